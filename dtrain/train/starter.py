"""Forks the ranks of this machine. Without GPUs it has imported torch, so they start at once, also after a restart.

With GPUs the ranks import torch: a process that has used a GPU must not fork, and torch imports many modules.

The supervisor (launch/forked.py) writes one line of JSON per command to stdin: {"ranks": 3, "rescue_s": 0, "peers_s":
5} starts ranks, {"kill": true} kills them. When all ranks have ended, the starter answers with one line: their exit
codes, in the order in which they ended, and which of them it has killed. It never trains itself: no threads of Python,
no CUDA, no process group. (The BLAS library may start threads when it is imported, and starts them again after a fork.)
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import os
import select
import signal
import sys
import time
import traceback
from pathlib import Path
from typing import Any

from dtrain.config import run_file
from dtrain.config.hardware import count_gpus
from dtrain.runs import system
from dtrain.runs.protocol import DONE, ELASTIC, PREEMPTED, STOP_SIGNALS, die_with_parent, free_port, slowness
from dtrain.start import import_folders

CRASHES = (signal.SIGSEGV, signal.SIGBUS, signal.SIGABRT, signal.SIGFPE, signal.SIGILL)  # the rank's own fault


LATE = ("numpy.random", "torch.utils._device", "torch.profiler._cupti_monitor")  # what torch imports when it is used


def preload(run_dir: Path) -> None:
    """Import what every rank needs. A module that fails here fails again in the ranks, which report it."""
    if count_gpus() and ELASTIC not in os.environ:
        return
    gc.disable()
    names = ["dtrain.train.rank", "dtrain.train.loop", *LATE]
    if not count_gpus():  # an optional package may initialize CUDA, which does not survive a fork
        targets = [s.get("_target_") for s in run_file.load(run_dir).values() if isinstance(s, dict)]
        names += [t.rpartition(".")[0] for t in targets if isinstance(t, str) and t.startswith("dtrain.")]
    for name in dict.fromkeys(names):
        with contextlib.suppress(Exception):
            module = importlib.import_module(name)
            getattr(module, "preload", lambda: None)()
    gc.freeze()  # the ranks' collections skip these objects; scanning would copy every page
    gc.enable()


class Starter:
    """Starts, reaps and kills the ranks of one generation at a time."""

    def __init__(self, run_dir: Path, answers: int) -> None:
        self.run_dir, self.process, self.answers = run_dir, os.getpid(), answers
        self.ranks: dict[int, int] = {}  # rank of each process
        self.ended: list[tuple[int, int]] = []  # (rank, exit code), in order
        self.killed: set[int] = set()  # the ranks that this process has killed
        self.kill_at: float | None = None  # set when a rank has failed: the others may save or report until then
        self.rescue_s = self.peers_s = 0.0
        self.woken, wake = os.pipe()  # SIGCHLD writes to it
        for end in (self.woken, wake):
            os.set_blocking(end, False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(wake, warn_on_full_buffer=False)

    def run(self) -> None:
        """Carry out commands until stdin is closed."""
        read = b""
        while True:
            left = max(0.0, self.kill_at - time.monotonic()) if self.kill_at is not None and self.ranks else None
            ready, _, _ = select.select([0, self.woken], [], [], left)
            if not ready:
                self.kill_at = None
                self.carry_out({"kill": True})
            if self.woken in ready:
                os.read(self.woken, 4096)
                self.reap()
            if 0 in ready:
                data = os.read(0, 65536)
                if not data:
                    return  # the ranks die with this process
                *lines, read = (read + data).split(b"\n")
                for line in lines:
                    self.carry_out(json.loads(line))

    def carry_out(self, command: dict[str, Any]) -> None:
        if command.get("kill"):
            for process, rank in self.ranks.items():
                self.killed.add(rank)
                os.kill(process, signal.SIGKILL)
            return
        self.ended, self.killed, self.kill_at = [], set(), None
        self.rescue_s, self.peers_s = command["rescue_s"], command["peers_s"]
        port = free_port()  # as late as possible: until rank 0 binds it, another process could
        for rank in range(command["ranks"]):
            process = os.fork()
            if process == 0:
                self.be_rank(rank, command["ranks"], port)
            self.ranks[process] = rank

    def be_rank(self, rank: int, num_ranks: int, port: int) -> None:
        """Train in this forked process, and end it."""
        code = 1
        try:
            die_with_parent()
            if os.getppid() != self.process:  # the starter died before that took effect
                os._exit(1)
            os.environ |= {
                "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(num_ranks),
                "LOCAL_WORLD_SIZE": str(num_ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port),
            }  # fmt: skip
            from dtrain.train import rank as entry

            entry.keep_stop_requests(self.run_dir, rank)
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            nothing = os.open(os.devnull, os.O_RDONLY)
            os.dup2(nothing, 0)  # commands are for the starter
            os.close(self.answers)  # so that the supervisor sees the starter's end, whatever a rank has forked
            entry.import_loop()
            code = entry.train(self.run_dir, rank)
        except BaseException:
            traceback.print_exc()  # into the starter's log
        finally:
            os._exit(code)  # a failed rank must not wait for its peers in the process group's destructor

    def reap(self) -> None:
        """Collect the ranks that have ended, and report when it was the last. A rank that failed ends the others."""
        found: list[tuple[int, int]] = []
        while self.ranks:
            process, status = os.waitpid(-1, os.WNOHANG)
            if process == 0:
                break
            if process in self.ranks:
                code = os.waitstatus_to_exitcode(status)
                found.append((self.ranks.pop(process), code))
                if code not in (DONE, PREEMPTED) and found[-1][0] not in self.killed:
                    name = f" ({signal.Signals(-code).name})" if code < 0 else ""
                    print(f"rank {found[-1][0]}, process {process}: exitcode: {code}{name}", file=sys.stderr)
        # ranks that ended between two looks come in the order of their numbers: one that was killed is the cause
        found.sort(key=lambda one: not is_from_outside(one[1]))
        self.ended += found
        failed = [code for _, code in found if code not in (DONE, PREEMPTED)]
        if failed and self.kill_at is None:
            wait_s = self.rescue_s if is_from_outside(failed[0]) else self.peers_s * slowness()
            self.kill_at = time.monotonic() + wait_s  # the others may wait for it forever
        if found and not self.ranks:
            os.write(self.answers, json.dumps({"ended": self.ended, "killed": sorted(self.killed)}).encode() + b"\n")


def is_from_outside(code: int) -> bool:
    """Was the process ended by a signal that is not its own fault?"""
    return code < 0 and -code not in CRASHES


if __name__ == "__main__":
    import_folders()
    die_with_parent()
    folder, stdout = Path(sys.argv[1]), os.dup(1)
    os.dup2(2, 1)  # what a module prints is no answer
    system.begin(folder)
    for number in STOP_SIGNALS:
        signal.signal(number, signal.SIG_IGN)  # only the supervisor decides when ranks stop
    preload(folder)
    Starter(folder, stdout).run()
