"""The runs of a search: launch them, find those that an earlier process launched, and stop them."""

from __future__ import annotations

import fcntl
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from dtrain import start
from dtrain.config.files import CODE
from dtrain.launch.user_code import trust_of
from dtrain.runs import record as records
from dtrain.runs.causes import one_line
from dtrain.runs.folder import look_again, read_json
from dtrain.runs.protocol import STOP_FILE
from dtrain.ui import unread
from dtrain.util.format import shell_path

LOCAL_S, QUEUE_S = 0.5, 5.0  # how often to check trials on this machine, and in a queue
LOCKS = ".launching"  # in the search's folder: one file per run, locked by its launcher while that lives


def ending(trial: int, status: str, run_dir: Path) -> str:
    """Describe on one line how a trial without a result ended, and why."""
    failure = read_json(run_dir / "failure.json") if status == "failed" else {}
    why = f": {one_line(failure)}" if failure else ""
    return f"trial {trial}: {status}{why}; dtrain why {shell_path(run_dir)}"


class Trials:
    """Launches runs by `dtrain launch`, each in a process: on this machine for the whole run, on SLURM to submit it.

    A launcher inherits a lock, which the kernel frees when the launcher ends. So a search that replaces a killed one
    knows whether a run still has a launcher, even if the search was killed before the run folder existed.
    """

    def __init__(self, folder: Path, fixed: Sequence[str]) -> None:
        self.folder, self.fixed = folder, list(fixed)
        self.processes: dict[Path, subprocess.Popen[bytes]] = {}
        self.adopted: set[Path] = set()  # runs with a launcher that an earlier process of this search started
        self.stopped = False

    def launch(self, run_dir: Path, values: Sequence[str], more: Sequence[str] = (), may_differ: str = "") -> None:
        """Start a run with these values, or resume it. may_differ: names of settings that a resume may change."""
        if run_dir.exists():
            look_again(run_dir)  # it may have been written on another node
        if (run_dir / "launch.json").exists():
            # the run folder has all settings, except for code, trust and trackers' servers, which must be typed again
            again = ("logger.", *(f"cluster.{name}" for name in CODE))
            typed = [word for word in self.fixed if word.startswith(again)]
            if trusted := trust_of([*self.fixed, *values]):
                typed.append(f"trust=[{','.join(trusted)}]")
            changed = [*values, f"resume_allow=[{may_differ}]"] if may_differ else []
            overrides = [*typed, *changed, f"resume={run_dir}", *more]
        else:
            shutil.rmtree(run_dir, ignore_errors=True)  # a launcher was killed before there was a run
            overrides = [*self.fixed, *values, f"run_dir='{run_dir}'", *more]
        command = [*start.command("dtrain.cli"), "launch", *overrides]
        with self._locked(run_dir) as lock:
            # a separate session: this process gets Ctrl-C and forwards it
            self.processes[run_dir] = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, start_new_session=True, pass_fds=[lock]
            )
        if self.stopped:  # by a signal that came since the decision to launch it
            self.processes[run_dir].terminate()

    @contextmanager
    def _locked(self, run_dir: Path) -> Iterator[int]:
        """Lock the run's file. A process that inherits the descriptor keeps the lock when this one closes it."""
        (self.folder / LOCKS).mkdir(exist_ok=True)
        descriptor = os.open(self.folder / LOCKS / run_dir.name, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            yield descriptor
        finally:
            os.close(descriptor)

    def has_launcher(self, run_dir: Path) -> bool:
        """Return whether a launcher of the run is alive, of this process or of an earlier one."""
        if run_dir in self.processes:
            return self.processes[run_dir].poll() is None
        try:
            with self._locked(run_dir):
                self.adopted.discard(run_dir)
        except BlockingIOError:
            self.adopted.add(run_dir)
        return run_dir in self.adopted

    def exit_code(self, run_dir: Path) -> int | None:
        """Return how the run's launcher ended; None if this process has started none."""
        process = self.processes.get(run_dir)
        return None if process is None else process.poll()

    def look(self, run_dirs: Sequence[Path]) -> list[records.Record]:
        """Read the state of the runs, with one SLURM query for all."""
        return records.load(run_dirs, ask_all=True)[0]

    def pause(self) -> None:
        """Wait before the next look; a stop signal ends the wait."""
        if self.stopped:
            self._ask_adopted()  # again: a launcher that was only starting has removed the first request
        until = time.monotonic() + (LOCAL_S if self.num_launchers() else QUEUE_S)
        while time.monotonic() < until and not self.stopped:
            time.sleep(0.1)

    def stop_on_signals(self) -> None:
        for stop in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(stop, self._on_signal)

    def _on_signal(self, number: int, frame: object) -> None:
        """Stop the search: local trials save and end; queued trials continue."""
        self.stopped = True
        unread.stopping()
        for process in self.processes.values():
            if process.poll() is None:
                process.terminate()
        self._ask_adopted()

    def _ask_adopted(self) -> None:
        for run_dir in self.adopted:
            if run_dir.is_dir():
                (run_dir / STOP_FILE).touch()

    def num_launchers(self) -> int:
        return sum(self.has_launcher(run_dir) for run_dir in [*self.processes, *self.adopted])
