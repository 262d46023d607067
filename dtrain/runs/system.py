"""System metrics of a node: a small process beside the ranks appends one line every few seconds.

`python -m dtrain.runs.system RUN_DIR SECONDS PARENT` writes logs/system-NODE.jsonl until the process PARENT ends. It
needs psutil, and nvidia-ml-py for GPUs (the extra `monitor`); without psutil there are no system metrics.
"""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from dtrain import start
from dtrain.runs.folder import last_launch, parse_line, read_json
from dtrain.runs.metrics import SYSTEM_FILE, rows
from dtrain.runs.nvml import GIB, Gpus
from dtrain.runs.protocol import STACK_SIGNAL, STOP_SIGNALS, die_with_parent
from dtrain.util import host_memory
from dtrain.util.format import as_dict, finite

INSTALL = "pip install 'dtrain[monitor]'"
MIB = 2**20
MOST_LINES = 10_000  # in a file; then older lines are thinned out. 14 hours at one line every 5 seconds
RECENT_S = 3600.0  # lines younger than this are never thinned out


def is_installed() -> bool:
    return find_spec("psutil") is not None


def begin(run_dir: Path) -> None:
    """Start the sampler of this node, as a child that dies with this process. Does nothing if it is off or missing."""
    cluster = as_dict(last_launch(read_json(run_dir / "launch.json")).get("cluster"))
    every = finite(cluster.get("system_metrics_every"))
    if not every or every < 0 or not is_installed():
        return
    command = [*start.command("dtrain.runs.system"), str(run_dir), str(every), str(os.getpid())]
    nothing = subprocess.DEVNULL  # srun waits until nobody holds the rank's output open
    try:
        subprocess.Popen(command, stdin=nothing, stdout=nothing, stderr=nothing, env=os.environ | start.environment())
    except OSError:
        pass  # too many processes: training matters more


def node_name() -> str:
    """Return the name under which SLURM knows this node, or the host's: a part of a file name."""
    return re.sub(r"[^\w.-]", "_", os.environ.get("SLURMD_NODENAME") or socket.gethostname())


class Sampler:
    """Reads this node. Rates are means since the last call of `read`."""

    def __init__(self, folder: Path) -> None:
        import psutil

        self.psutil, self.folder, self.gpus = psutil, folder, Gpus()
        psutil.cpu_percent(None)  # the first call has nothing to compare with
        self.before = self._counters()

    def _counters(self) -> dict[str, float]:
        """Bytes since the machine started, and the time in seconds."""
        disk = self.psutil.disk_io_counters()  # None in some containers
        ports = [port for name, port in self.psutil.net_io_counters(pernic=True).items() if name != "lo"]
        found = {"time": time.monotonic()}
        if disk:
            found |= {"disk_read": disk.read_bytes, "disk_write": disk.write_bytes}
        found["net_in"] = sum(port.bytes_recv for port in ports)
        found["net_out"] = sum(port.bytes_sent for port in ports)
        return found

    def read(self) -> dict[str, Any]:
        now, before = self._counters(), self.before
        self.before = now
        seconds = max(1e-3, now["time"] - before["time"])
        total, free = host_memory.total_bytes(), host_memory.free_bytes()
        values: dict[str, Any] = {"time": round(time.time(), 2), "cpu_percent": self.psutil.cpu_percent(None)}
        if free is not None:
            values |= {"memory_gib": round((total - free) / GIB, 3), "memory_total_gib": round(total / GIB, 3)}
        for name in [name for name in now if name in before and name != "time"]:
            values[f"{name}_mib_s"] = round(max(0.0, now[name] - before[name]) / MIB / seconds, 3)
        try:
            values["disk_free_gib"] = round(self.psutil.disk_usage(str(self.folder)).free / GIB, 2)
        except OSError:
            pass
        return values | ({"gpus": gpus} if (gpus := self.gpus.read()) else {})


class SystemFile:
    """Appends samples to a node's file, whose size is limited however long the run is."""

    def __init__(self, path: Path, most_lines: int = MOST_LINES) -> None:
        self.path, self.most_lines = path, most_lines
        self.num_lines = len(rows(path))

    def append(self, sample: dict[str, Any]) -> None:
        with open(self.path, "a") as file:
            file.write(json.dumps(sample) + "\n")
        self.num_lines += 1
        if self.num_lines > self.most_lines:
            lines = thinned(self.path.read_bytes().splitlines(), self.most_lines // 2)
            temporary = self.path.with_name(f".{self.path.name}.tmp")
            temporary.write_bytes(b"".join(line + b"\n" for line in lines))
            os.replace(temporary, self.path)
            self.num_lines = len(lines)


def thinned(lines: Iterable[bytes], wanted: int) -> list[bytes]:
    """Keep about `wanted` lines: all of the last hour, if that is not too many, and older ones at equal distances."""
    stamped = [(stamp, line) for line in lines if (stamp := finite(parse_line(line).get("time"))) is not None]
    newest = max((stamp for stamp, _ in stamped), default=0.0)
    recent = [line for stamp, line in stamped if stamp > newest - RECENT_S][-wanted // 2 :]
    older = stamped[: len(stamped) - len(recent)]
    if not older:
        return recent
    distance, span = 1.0, older[-1][0] - older[0][0]
    while span / distance > wanted - len(recent):
        distance *= 2  # so that the intervals of the next time are made of whole ones of this time
    kept: dict[float, bytes] = {}
    for stamp, line in older:
        kept.setdefault(stamp // distance, line)  # the first line of each interval
    return [*kept.values(), *recent]


def main(run_dir: Path, every: float, parent: int) -> None:
    die_with_parent()
    if os.getppid() != parent:  # it ended before that took effect
        return
    for number in (*STOP_SIGNALS, signal.SIGHUP, STACK_SIGNAL):  # meant for the ranks: they may save for minutes
        signal.signal(number, signal.SIG_IGN)
    os.nice(10)
    sampler, file = Sampler(run_dir), SystemFile(run_dir / SYSTEM_FILE.format(node_name()))
    due = time.monotonic()
    while True:
        due = max(due + every, time.monotonic())  # after a stop of the machine, no burst of samples
        time.sleep(max(0.0, due - time.monotonic()))
        try:
            file.append(sampler.read())
        except OSError:
            pass  # a full disk, or a file system that is away for a moment


if __name__ == "__main__":
    main(Path(sys.argv[1]), float(sys.argv[2]), int(sys.argv[3]))
