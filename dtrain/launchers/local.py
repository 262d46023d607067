"""This machine: torchrun starts the ranks, and a supervisor here watches them.

The supervisor never forwards a signal to torchrun (which dies of USR1 and leaves its workers, and kills them 30 s after
TERM). It leaves a stop file in the run folder; the ranks see it, agree on a step, save and end with 75.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import FrameType
from typing import Any

from dtrain import console
from dtrain.config import bad
from dtrain.contract import (
    BAD_CONFIG,
    DONE,
    FAILED,
    PREEMPTED,
    STOP_FILE,
    STOP_SIGNALS,
    die_with_parent,
    read_json,
    write_json,
)

LOST_PEER = re.compile(
    r"closed by peer|reset by peer|broken pipe|refused|remote process exited|Socket ?Timeout|ncclRemoteError", re.I
)


class Local:
    def __init__(self, nodes: int = 1, processes: int | None = None, max_restarts: int = 0, grace_s: int = 300) -> None:
        if nodes != 1:
            raise bad("cluster.nodes", nodes, "cluster=local is one machine", "cluster.nodes=1")
        assert processes is not None, "the launcher fills it in"
        self.processes, self.max_restarts, self.grace_s = processes, max_restarts, grace_s
        self.stop_requests = 0

    def command(self, run_dir: Path) -> list[str]:
        torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={self.processes}"]
        return [*torchrun, "-m", "dtrain.train", str(run_dir)]

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
        before = {number: signal.signal(number, self._on_signal) for number in STOP_SIGNALS}
        try:
            for attempt in range(self.max_restarts + 1):
                code = self._run_once(run_dir, attempt)
                if (
                    code in (DONE, BAD_CONFIG, PREEMPTED) or self.stop_requests
                ):  # a bad configuration does not get better
                    break
            console.print_summary(run_dir)
            return code
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self.stop_requests += 1

    def _run_once(self, run_dir: Path, attempt: int) -> int:
        logs = run_dir / "logs"
        logs.mkdir(exist_ok=True)
        for old in (
            run_dir / STOP_FILE,
            run_dir / "failure.json",
            run_dir / "summary.json",
            *logs.glob("failure-*.json"),
        ):
            old.unlink(missing_ok=True)
        with open(logs / "torchrun.log", "ab") as log:
            position = log.tell()
            torchrun = subprocess.Popen(
                self.command(run_dir), env=os.environ | self.environment(), stdin=subprocess.DEVNULL, stdout=log, stderr=log,
                start_new_session=True, preexec_fn=die_with_parent,
            )  # fmt: skip
        try:
            with console.Monitor(run_dir) as monitor:
                if attempt:
                    monitor.message(f"restart {attempt} of {self.max_restarts}, from the newest checkpoint")
                self._watch(torchrun, run_dir, monitor)
                monitor.finish()
        finally:
            if torchrun.poll() is None:  # we are being torn down ourselves: take everything along
                os.killpg(torchrun.pid, signal.SIGKILL)
        return self._outcome(
            run_dir, torchrun.wait(), (logs / "torchrun.log").read_bytes()[position:].decode(errors="replace")
        )

    def _watch(self, torchrun: subprocess.Popen[bytes], run_dir: Path, monitor: console.Monitor) -> None:
        deadline, said = None, 0
        while torchrun.poll() is None:
            monitor.poll()
            if self.stop_requests > said:
                said = self.stop_requests
                if said == 1:
                    (run_dir / STOP_FILE).touch()
                    deadline = time.monotonic() + self.grace_s
                    monitor.message(
                        f"stop requested: saving after this step, at most {self.grace_s} s (once more: end at once)"
                    )
            if said > 1 or (deadline is not None and time.monotonic() > deadline):
                os.killpg(torchrun.pid, signal.SIGKILL)  # its ranks die with it, see die_with_parent
            time.sleep(0.05)

    def _outcome(self, run_dir: Path, returncode: int, torchrun_log: str) -> int:
        """The exit code; when it failed, failure.json with the rank that failed first."""
        summary = read_json(run_dir / "summary.json")
        if summary.get("status") in ("done", "preempted"):
            return DONE if summary["status"] == "done" else PREEMPTED
        failure = first_failure(run_dir, returncode, torchrun_log)
        write_json(run_dir / "failure.json", failure)
        write_json(run_dir / "summary.json", summary | {"status": "failed", "reason": failure["message"]})
        return int(failure["exit_code"])


def first_failure(run_dir: Path, returncode: int, torchrun_log: str) -> dict[str, Any]:
    """Which rank failed first, and why: from the ranks' own notes, or from torchrun when a rank was killed.

    A rank that is killed leaves no note, but its peers do, about the lost connection; then the killed one is named.
    """
    notes = [json.loads(p.read_text()) for p in (run_dir / "logs").glob("failure-*.json")]
    notes.sort(key=lambda note: note["time"])
    causes = [note for note in notes if not LOST_PEER.search(note["message"])]
    if causes:
        return causes[0]
    killed = re.findall(r"rank\s*:\s*(\d+).*?\n.*?exitcode\s*:\s*-(\d+)", torchrun_log)
    for rank, number in killed:
        if int(number) != signal.SIGTERM:
            name = signal.Signals(int(number)).name
            hint = " (out of memory?)" if name == "SIGKILL" else ""
            return {"rank": int(rank), "type": name, "message": f"the process was killed by {name}{hint}", "exit_code": FAILED,
                    "log": f"logs/rank-{rank}.log", "traceback": ""}  # fmt: skip
    if notes:
        return notes[0]
    tail = "\n".join(torchrun_log.splitlines()[-15:])
    return {"rank": None, "type": "launch", "message": f"torchrun ended with {returncode}\n{tail}", "exit_code": FAILED,
            "log": "logs/torchrun.log", "traceback": ""}  # fmt: skip
