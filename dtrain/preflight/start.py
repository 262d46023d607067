"""Start preflight programs on nodes, and make sure that they end.

As a program, `python -m dtrain.preflight.start N COMMAND …`, it replaces srun on this machine: N tasks.
"""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Protocol

from dtrain import start as starting
from dtrain.runs.protocol import die_with_parent
from dtrain.util.format import clean


class Starter(Protocol):
    """Starts argv `tasks_per_node` times on each node, with more environment variables and its output in a log."""

    def __call__(
        self, argv: list[str], nodes: list[str], tasks_per_node: int, env: dict[str, str], log: Path
    ) -> subprocess.Popen[bytes]: ...


def local_starter(
    argv: list[str], nodes: list[str], tasks_per_node: int, env: dict[str, str], log: Path
) -> subprocess.Popen[bytes]:
    """Start on this machine, as one node."""
    assert len(nodes) == 1, "one machine is one node"
    command, here = argv, {"DTRAIN_NODE": nodes[0], "SLURM_LOCALID": "0"}
    if tasks_per_node > 1:
        command = [*starting.command("dtrain.preflight.start"), str(tasks_per_node), *argv]
    try:
        file = open(log, "ab")  # noqa: SIM115
    except OSError:  # a full disk: its output is lost, its findings are not
        file = open(os.devnull, "ab")  # noqa: SIM115
    with file:
        return subprocess.Popen(
            command, env=os.environ | env | starting.environment(argv) | here,
            stdin=subprocess.DEVNULL, stdout=file, stderr=file, start_new_session=True, preexec_fn=die_with_parent,
        )  # fmt: skip


def python_command(config: Mapping[str, Any], module: str) -> list[str]:
    """Return the command for one of our modules on a node: this Python, cluster.python, or a container's."""
    cluster = config["cluster"]
    if not cluster.get("python") and not cluster.get("container_image"):
        return starting.command(module)
    return starting.command(module, shlex.split(cluster.get("python") or shlex.quote(sys.executable)))


def end(processes: Iterable[subprocess.Popen[bytes] | str], patience_s: float = 2.0) -> None:
    """Wait briefly for processes that are about to end, terminate the rest, then kill: srun may hang with its node."""
    left = [p for p in processes if isinstance(p, subprocess.Popen)]
    for act, wait_s in ((None, patience_s), (subprocess.Popen.terminate, 2.0), (subprocess.Popen.kill, 2.0)):
        for process in left:
            if act is not None:
                act(process)
        until = time.monotonic() + wait_s
        while (left := [p for p in left if p.poll() is None]) and time.monotonic() < until:
            time.sleep(0.02)


def tail(log: Path, lines: int = 3) -> str:
    """Return the last lines of a log as one line, for a message; "" if there is no log."""
    try:
        text = clean(log.read_bytes()[-4000:].decode(errors="replace"))
    except OSError:
        return ""
    return " / ".join(line.strip() for line in text.splitlines()[-lines:] if line.strip())


def main(argv: list[str]) -> int:
    """Run the command N times in parallel, each with its SLURM_LOCALID; the first failure ends all."""
    number = int(argv[0])
    tasks: list[subprocess.Popen[bytes]] = []
    for i in range(number):
        environ = os.environ | {"SLURM_LOCALID": str(i)}
        tasks.append(subprocess.Popen(argv[1:], env=environ, preexec_fn=die_with_parent))
    while any(task.poll() is None for task in tasks) and not any(task.poll() for task in tasks):
        time.sleep(0.05)
    end(tasks, patience_s=0)
    return max(abs(task.wait()) for task in tasks)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
