"""The ranks of this machine: forked by one starter process, which lives as long as the run.

torchrun and each of its ranks import torch, one after the other, which takes seconds each. The starter
(train/starter.py) learns at once when a rank is killed. Without GPUs it imports torch once for all ranks, restarts and
changes of an elastic run; with GPUs it does not import torch, and the ranks do.
"""

from __future__ import annotations

import functools
import json
import os
import select
import shlex
import signal
import subprocess
import time
from pathlib import Path
from typing import IO, Any

from dtrain import start
from dtrain.config import elastic
from dtrain.config.hardware import gpus_per_node
from dtrain.launch.members import Members
from dtrain.launch.supervisor import PEERS_S, tie_to
from dtrain.launch.torchrun import OWN_CODES, Torchrun, ended
from dtrain.preflight import network_env
from dtrain.runs import causes
from dtrain.runs.protocol import DONE, ELASTIC, STOP_SIGNALS

KILL_S = 3.0  # until a starter that does not answer is killed, too: it may still import torch, or be stopped


class ForkedRanks:
    """The ranks of one generation, with those methods of a process that a supervisor calls."""

    def __init__(self, starter: subprocess.Popen[bytes], num_ranks: int, rescue_s: float) -> None:
        self.starter, self.returncode = starter, None
        self.exits: list[tuple[int, int]] = []  # (rank, exit code), in order, without those that dtrain has killed
        self.read = b""
        self.kill_by: float | None = None
        self._send(ranks=num_ranks, rescue_s=rescue_s, peers_s=PEERS_S)

    returncode: int | None

    def _send(self, **command: Any) -> None:
        assert self.starter.stdin is not None
        try:
            self.starter.stdin.write(json.dumps(command).encode() + b"\n")
            self.starter.stdin.flush()
        except OSError:
            pass  # the starter is dead, and so are its ranks

    def kill(self) -> None:
        self._send(kill=True)
        self.kill_by = time.monotonic() + KILL_S

    def poll(self) -> int | None:
        return self._wait(0)

    def wait(self) -> int:
        while (code := self._wait(1)) is None:
            pass
        return code

    def _wait(self, seconds: float) -> int | None:
        """Wait until all ranks have ended, for some seconds at most; return the first code that is not 0."""
        output = self.starter.stdout
        assert output is not None
        while self.returncode is None and select.select([output], [], [], seconds)[0]:
            data = os.read(output.fileno(), 65536)
            self.read += data
            if not data:
                self.returncode = self.starter.wait() or 1
            elif b"\n" in self.read:
                answer = json.loads(self.read)
                self.exits = [(rank, code) for rank, code in answer["ended"] if rank not in answer["killed"]]
                self.returncode = next((code for _, code in answer["ended"] if code), 0)
        if self.returncode is None and self.kill_by is not None and time.monotonic() > self.kill_by:
            os.killpg(self.starter.pid, signal.SIGKILL)  # a session of its own; a restart begins another one
            self.returncode = self.starter.wait()
        return self.returncode


class Forked(Torchrun):
    """The ranks of this machine, whose number may change if there are members."""

    log_name = "starter.log"

    def __init__(self, config: dict[str, Any], max_restarts: int, grace_s: int, members: Members | None = None) -> None:
        super().__init__(elastic.sized(config, members.usable[-1]) if members else config, [], max_restarts, grace_s)
        self.members = members
        on_gpus = gpus_per_node(config["cluster"])
        can_rescue = config["strategy"]["_target_"] == "dtrain.strategies.ddp.DDP" and not on_gpus
        # a survivor of an elastic run may save (train/rescue.py), and others report what they waited for
        self.rescue_s = PEERS_S if can_rescue or not members else 0.0
        self.starter: subprocess.Popen[bytes] | None = None
        self.ranks: ForkedRanks | None = None

    def command(self, run_dir: Path) -> list[str]:
        return [*start.command("dtrain.train.starter"), str(run_dir)]

    def environment(self) -> dict[str, str]:
        return super().environment() | ({ELASTIC: "1"} if self.members else {})

    def dry_run(self, run_dir: Path) -> None:
        """Print a command that starts the largest number of ranks; the starter ends when its input does."""
        for name, value in self.environment().items():
            print(f"export {name}={network_env.quote(value)}")
        order = json.dumps({"ranks": self.num_ranks, "rescue_s": 0, "peers_s": PEERS_S})
        print(f"(echo '{order}'; sleep infinity) | {shlex.join(self.command(run_dir))}")

    def start(self, run_dir: Path, log: IO[bytes]) -> ForkedRanks:
        if self.starter is None or self.starter.poll() is not None:
            self.starter = subprocess.Popen(
                self.command(run_dir),
                env=os.environ | self.environment(),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                start_new_session=True,
                preexec_fn=functools.partial(tie_to, os.getpid()),
            )
        self.ranks = ForkedRanks(self.starter, self.num_ranks, self.rescue_s)
        return self.ranks

    def launch(self, run_dir: Path) -> int:
        try:
            return super().launch(run_dir)
        finally:
            if self.starter is not None:
                self.starter.kill()
                self.starter.communicate()

    def place(self) -> dict[str, Any]:
        return super().place() | ({"ranks": self.num_ranks} if self.members else {})

    def kill(self, process: Any) -> None:
        process.kill()

    def killed_ranks(self, output: str) -> list[tuple[int, str]]:
        """The rank that ended first from a signal, or with a code that is not ours: the starter kills the others."""
        exits = self.ranks.exits if self.ranks else []
        return [(rank, ended(code)) for rank, code in exits if code not in (DONE, *OWN_CODES)][:1]

    def ended_well(self, output: str) -> list[int]:
        return [rank for rank, code in self.ranks.exits if code == DONE] if self.ranks else []

    def lost(self, run_dir: Path) -> dict[int, str]:
        """The ranks that were killed from outside: not by their own fault, and not by the supervisor."""
        outside = {number.name for number in (signal.SIGKILL, signal.SIGHUP, *STOP_SIGNALS)}
        return {self.failure["rank"]: causes.one_line(self.failure)} if self.failure.get("type") in outside else {}

    def choose(self, size: int, gone: set[int]) -> bool:
        self.num_ranks = self.world_size = size
        return True
