"""This machine: torchrun starts the ranks, and a supervisor here watches them.

The supervisor never forwards a signal to torchrun (which dies of USR1 and leaves its workers, and kills them 30 s after
TERM). It leaves a stop file in the run folder; the ranks see it, agree on a step, save and end with 75.
"""

from __future__ import annotations

import contextlib
import functools
import json
import math
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import FrameType
from typing import Any

from dtrain import console
from dtrain.config import bad
from dtrain.contract import DONE, FAILED, PREEMPTED, STOP_FILE, STOP_SIGNALS, die_with_parent
from dtrain.rundir import read_summary, write_json
from dtrain.words import short_path

# what a rank says whose peer has gone: gloo, NCCL
LOST_PEER = re.compile(r"(closed|reset) by peer|Broken pipe|Socket Timeout|remote process exited|ncclRemoteError", re.I)
PEERS_S = 5.0  # how long the other ranks may take to end after one has failed


class Local:
    def __init__(self, nodes: int = 1, processes: int | None = None, max_restarts: int = 0, grace_s: int = 300) -> None:
        if nodes != 1:
            raise bad("cluster.nodes", nodes, "cluster=local is one machine", "cluster.nodes=1")
        assert processes is not None, "the launcher fills it in"
        self.processes, self.max_restarts, self.grace_s = processes, max_restarts, grace_s
        self.stop_requested_at = math.inf
        self.end_at_once = False
        self.failure: dict[str, Any] = {}

    def command(self, run_dir: Path) -> list[str]:
        torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={self.processes}"]
        return [*torchrun, "-m", "dtrain.rank", str(run_dir)]

    def environment(self) -> dict[str, str]:
        """What the ranks get beside the user's own environment, which wins."""
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        ours = {
            "OMP_NUM_THREADS": str(
                max(1, cores // self.processes)
            ),  # torchrun would say 1; more than the cores is slower
            "PYTHONPATH": os.pathsep.join(
                filter(None, [os.getcwd(), *os.environ.get("PYTHONPATH", "").split(os.pathsep)])
            ),
        }
        return {k: v for k, v in ours.items() if k == "PYTHONPATH" or k not in os.environ}

    def dry_run(self, run_dir: Path, config: dict[str, Any]) -> None:
        for name, value in self.environment().items():
            print(f"export {name}={shlex.quote(value)}")
        print(shlex.join(self.command(run_dir)))

    def launch(self, run_dir: Path) -> int:
        """Run to the end, restarting after failures as often as allowed; give the exit code."""
        wanted = [*STOP_SIGNALS, signal.SIGHUP]  # the terminal was closed
        heard = [s for s in wanted if signal.getsignal(s) != signal.SIG_IGN]  # nohup ignores SIGHUP, and means it
        before = {number: signal.signal(number, self._on_signal) for number in heard}
        try:
            with console.Monitor(run_dir) as monitor:
                for attempt in range(self.max_restarts + 1):
                    again = f", restart {attempt} of {self.max_restarts} from the newest checkpoint" if attempt else ""
                    monitor.message(f"starting {self.processes} ranks{again}; logs in {short_path(run_dir / 'logs')}")
                    code = self._run_once(run_dir, monitor)
                    if code != FAILED or self.stop_requested_at < math.inf:  # a bad configuration does not get better
                        break
            failed = code not in (DONE, PREEMPTED)
            console.print_summary(
                run_dir, status="failed" if failed else None, failure=self.failure if failed else None
            )
            return code
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        """The first signal asks for a stop. Schedulers send several; only a second Ctrl-C, later, is impatience."""
        now = time.monotonic()
        if number == signal.SIGINT and now > self.stop_requested_at + 1:
            self.end_at_once = True
        self.stop_requested_at = min(self.stop_requested_at, now)

    def _run_once(self, run_dir: Path, monitor: console.Monitor) -> int:
        logs = run_dir / "logs"
        logs.mkdir(exist_ok=True)
        for old in (run_dir / STOP_FILE, run_dir / "failure.json", *logs.glob("failure-*.json")):
            old.unlink(missing_ok=True)
        past = read_summary(run_dir)
        with open(logs / "torchrun.log", "ab") as log:
            position = log.tell()
            torchrun = subprocess.Popen(
                self.command(run_dir),
                env=os.environ | self.environment(),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,  # Ctrl-C is for us: torchrun must not see it
                preexec_fn=functools.partial(_tie_to, os.getpid()),
            )
        try:
            killed_because = self._watch(torchrun, run_dir, monitor)
        finally:
            if torchrun.poll() is None:  # we are being torn down ourselves: take everything along
                os.killpg(torchrun.pid, signal.SIGKILL)
        returncode = torchrun.wait()

        summary = read_summary(run_dir)
        if summary != past and summary.get("status") in ("done", "preempted"):
            return DONE if summary["status"] == "done" else PREEMPTED
        if killed_because:
            self.failure = failure(None, "stopped", killed_because, "logs/rank-0.log")
        else:
            self.failure = first_failure(run_dir, returncode, (logs / "torchrun.log").read_bytes()[position:].decode())
        with contextlib.suppress(OSError):  # on a full disk the message on the screen must do
            write_json(run_dir / "failure.json", self.failure)
            write_json(run_dir / "summary.json", summary | {"status": "failed"})
        return int(self.failure["exit_code"])

    def _watch(self, torchrun: subprocess.Popen[bytes], run_dir: Path, monitor: console.Monitor) -> str:
        """Show progress until torchrun ends. If it had to be killed, on whose account."""
        deadline = math.inf
        because = ""
        while torchrun.poll() is None:
            monitor.poll()
            now = time.monotonic()
            if not because and self.stop_requested_at < math.inf:
                (run_dir / STOP_FILE).touch()
                deadline, because = now + self.grace_s, f"it did not save within cluster.grace_s={self.grace_s} seconds"
                monitor.message(
                    f"stop requested: saving after this step, within {self.grace_s} s (Ctrl-C: end at once)"
                )
            elif deadline == math.inf and any((run_dir / "logs").glob("failure-*.json")):
                deadline = now + PEERS_S  # a rank has failed; its peers may wait for it for ever
            if self.end_at_once:
                deadline, because = now, "stopped twice: ended at once, without saving"
            if now >= deadline:
                os.killpg(torchrun.pid, signal.SIGKILL)  # its ranks die with it, see die_with_parent
                torchrun.wait()
                return because
            time.sleep(0.05)
        return ""


def first_failure(run_dir: Path, returncode: int, torchrun_log: str) -> dict[str, Any]:
    """Which rank failed first, and why: from the ranks' own notes, or from torchrun when a rank was killed.

    A rank that is killed leaves no note, but its peers do, about the lost connection; then the killed one is named.
    """
    notes = [json.loads(p.read_text()) for p in (run_dir / "logs").glob("failure-*.json")]
    notes.sort(key=lambda note: note["time"])
    causes = [note for note in notes if not LOST_PEER.search(note["message"])]
    if causes:
        return causes[0]
    for rank, number in re.findall(r"rank\s*:\s*(\d+).*?\n.*?exitcode\s*:\s*-(\d+)", torchrun_log):
        if int(number) != signal.SIGTERM:  # that one is torchrun ending the others
            name = signal.Signals(int(number)).name
            hint = " (out of memory?)" if name == "SIGKILL" else ""
            return failure(int(rank), name, f"the process was killed by {name}{hint}", f"logs/rank-{rank}.log")
    if notes:
        return notes[0]
    if shutil.disk_usage(run_dir).free < 2**20:
        return failure(None, "disk", f"the disk of {run_dir} is full. Fix: make room, then resume", "logs/torchrun.log")
    tail = "\n".join(torchrun_log.splitlines()[-15:])
    return failure(None, "launch", f"torchrun ended with {returncode}\n{tail}", "logs/torchrun.log")


def failure(rank: int | None, kind: str, message: str, log: str) -> dict[str, Any]:
    return {"rank": rank, "type": kind, "message": message, "exit_code": FAILED, "log": log, "traceback": ""}


def _tie_to(parent: int) -> None:
    """In the child, before it becomes torchrun: die with the launcher, also if it is dead already."""
    die_with_parent()
    if os.getppid() != parent:
        os._exit(1)
