"""Starts and ends the process that feeds a run's trackers (dtrain/loggers/follow.py)."""

from __future__ import annotations

import contextlib
import os
import shlex
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from dtrain import start
from dtrain.checks.loggers import ADDRESSES
from dtrain.loggers.follow import LAST_S, LOCAL_S, LOG, STATE
from dtrain.runs.folder import read_json
from dtrain.runs.protocol import MOST_PATIENCE
from dtrain.util.format import as_dict, clean, shell_path

MOST_S = (LAST_S + LOCAL_S) * MOST_PATIENCE  # a follower that has not ended by then has a fault
TICK_S = 0.02
QUIET_S = 1.0  # after this many seconds, say what is being waited for


class Follower:
    """A fault of it must not fail the run: it reports into logs/trackers.log, and here in one line at the end."""

    def __init__(self, run_dir: Path, loggers: dict[str, Any]) -> None:
        self.run_dir, self.loggers = run_dir, loggers
        self.process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        if self.loggers:
            with contextlib.suppress(OSError):  # a full disk, or too many processes: training matters more
                self._start()

    def _start(self) -> None:
        (self.run_dir / "logs").mkdir(exist_ok=True)
        (self.run_dir / STATE).unlink(missing_ok=True)
        command = [*start.command("dtrain.loggers.follow"), str(self.run_dir)]
        with open(self.run_dir / LOG, "ab") as log:
            self.process = subprocess.Popen(
                command,
                env=os.environ | start.environment(),
                stdin=subprocess.PIPE,  # closed when the run ends, also if this process is killed
                stdout=log,
                stderr=log,
                start_new_session=True,  # Ctrl-C must reach only the supervisor
            )

    def finish(self, say: Callable[[str], None], at_once: Callable[[], bool], most_s: float = MOST_S) -> None:
        """Let it send the rest, for a bounded time; report a tracker that did not get everything."""
        if self.process is None or self.process.stdin is None:
            for name in self.loggers:
                say(f"{name} got no metrics: its process did not start; this sends them: {self.command(name)}")
            return
        self.process.stdin.close()
        names, began, said = ", ".join(self.loggers), time.monotonic(), False
        while self.process.poll() is None:
            waited = time.monotonic() - began
            if at_once() or waited > most_s:
                self.process.kill()
                break
            if waited > QUIET_S and not said:
                said = True
                say(f"sending the rest of the metrics to {names}")
            time.sleep(TICK_S)
        code, state = self.process.wait(), read_json(self.run_dir / STATE)
        if code == 0:
            return
        for name in self.loggers:
            found = as_dict(state.get(name))
            if not found.get("complete"):
                why = clean(str(found.get("problem") or f"see {LOG}"))
                say(f"{name} did not get all metrics ({why}); this sends the rest: {self.command(name)}")

    def command(self, name: str) -> str:
        section = as_dict(self.loggers[name])
        typed = [f"logger.{name}.{key}={section[key]}" for key in ADDRESSES if section.get(key)]
        return shlex.join(["dtrain", "log"]) + f" {shell_path(self.run_dir)} " + shlex.join([f"logger={name}", *typed])
