"""Monitors the ranks of a run on any launcher: shows progress, requests a stop, finds the rank that failed first.

A stop request is never a signal to the program that started the ranks: torchrun dies on USR1 and orphans its workers,
and kills them 30 s after TERM. It is a file in the run folder: the ranks see it, agree on a step, save and exit 75.
"""

from __future__ import annotations

import contextlib
import functools
import math
import os
import signal
import subprocess
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from types import FrameType
from typing import IO, Any, Protocol

from dtrain.config.files import is_script
from dtrain.launch import hang, script_rank
from dtrain.launch.attempt_files import AttemptFiles
from dtrain.launch.failures import failure, first_failure, is_timeout, mismatch, of_standstill
from dtrain.launch.follower import MOST_S, Follower
from dtrain.launch.members import Members
from dtrain.launch.metrics_server import MetricsServer
from dtrain.launch.wait_graph import Position
from dtrain.report.why import short_form
from dtrain.runs import causes, memory
from dtrain.runs.folder import (
    latest_checkpoint,
    look_again,
    newest_step,
    note_attempt,
    read_summary,
    wall_s,
    write_json,
)
from dtrain.runs.protocol import (
    BAD_CONFIG,
    DONE,
    FAILED,
    HANG_FILE,
    PREEMPTED,
    SCALE_FILE,
    SCRIPT_STOP_AT,
    STOP_FILE,
    STOP_SIGNALS,
    die_with_parent,
    slowness,
)
from dtrain.ui import unread
from dtrain.ui.console import print_summary
from dtrain.ui.progress import Monitor
from dtrain.util import disk_space, file_handles, kernel_log
from dtrain.util.format import as_dict, counted, short_path

PEERS_S = 5.0  # time for the other ranks to exit after one rank failed, on an idle machine
TICK_S = 0.05  # between two checks of the process and of signals; neither touches the file system
LOOK_S = 1.0  # maximum time between two file checks; a run that just started is checked more often


def origin(run_dir: Path) -> str:
    """Describe where a restart begins."""
    newest, in_memory = latest_checkpoint(run_dir), memory.newest_step(run_dir)
    if in_memory > newest_step(run_dir):
        return f"from the copy of step {in_memory} in memory"
    return f"from {newest.name}" if newest else "from the beginning, as nothing was saved yet"


class Ranks(Protocol):
    """The program that starts the ranks, as a process: subprocess.Popen has these methods."""

    def poll(self) -> int | None: ...
    def wait(self) -> int: ...


class Supervisor:
    """The part shared by torchrun on this machine and srun in an allocation. A subclass defines how ranks start."""

    log_name: str  # file in RUN/logs: output of the program that starts the ranks
    config: dict[str, Any]  # of the run
    start_s = math.inf  # if no rank has started after this many seconds, give up
    ends_copies = False  # whether a failed run's copies in memory (checkpoint.peer) are on this host, and end with it
    shows_output = True  # of rank 0 of a user's own program
    node_rank = 0  # if one run has several supervisors, only node 0's writes the run's state
    members: Members | None = None  # of a run whose number of ranks may change
    server: MetricsServer | None = None  # of cluster.metrics_port

    def __init__(
        self, num_ranks: int, max_restarts: int, grace_s: int, hang_timeout: float | None = None, on_hang: str = "stop"
    ) -> None:
        self.num_ranks, self.max_restarts, self.grace_s = num_ranks, max_restarts, grace_s
        self.hang_timeout, self.on_hang = hang_timeout, on_hang
        self.world_size = num_ranks  # more, if one run has several supervisors
        self.is_one_host = True
        self.standstill: hang.Standstill | None = None  # the one that lasted until the attempt ended
        self.stop_requested_at = math.inf
        self.end_at_once = self.ranks_began = self.stepped = self.never_started = False
        self.ended_first: list[int] = []  # ranks whose processes had ended when the first failure note was seen
        self.failure: dict[str, Any] = {}
        self.failures: list[dict[str, Any]] = []  # one per failed attempt, including the current one

    # ---- defined by a subclass -------------------------------------------------------------------------------

    def command(self, run_dir: Path) -> list[str]:
        raise NotImplementedError

    def environment(self) -> dict[str, str]:
        """Environment variables added for the ranks; variables that the user set take precedence."""
        raise NotImplementedError

    def start(self, run_dir: Path, log: IO[bytes]) -> Any:
        """Start the ranks; their output from before they have logs of their own goes to `log`."""
        return subprocess.Popen(
            self.command(run_dir),
            env=os.environ | self.environment(),
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,  # Ctrl-C must reach only the supervisor
            preexec_fn=functools.partial(tie_to, os.getpid()),
        )

    def kill(self, process: Any) -> None:
        os.killpg(process.pid, signal.SIGKILL)

    def on_stop(self) -> None:
        """Notify the ranks faster than the stop file does, where the launcher can."""

    def on_first_step(self, run_dir: Path) -> None:
        """Hook: called once when all ranks have connected and finished a step."""

    def ask_for_stacks(self, positions: dict[int, Position]) -> None:
        """Ask ranks to print their stacks into their logs."""
        hang.send_here(positions)

    def killed_ranks(self, log: str) -> list[tuple[int, str]]:
        """Parse `log_name` for ranks that were killed and left no failure note: (rank, signal name)."""
        raise NotImplementedError

    def ended_well(self, log: str) -> list[int]:
        """Parse `log_name` for ranks that ended with exit code 0."""
        return []

    def lost(self, run_dir: Path) -> dict[int, str]:
        """After a failure of an elastic run: which members are gone, and why. The run's own errors are not here."""
        raise NotImplementedError

    def choose(self, size: int, gone: set[int]) -> bool:
        """Let this many members take part in the next attempt, without those that are gone; False: they cannot."""
        raise NotImplementedError

    # ---- shared by all launchers -----------------------------------------------------------------------------

    def supervise(self, run_dir: Path, stop: Callable[[], bool] = lambda: False) -> int:
        """Run to the end, restarting after failures up to the limit; return the exit code.

        stop: returns True if a stop signal arrived before the handlers here were installed.
        """
        wanted = [*STOP_SIGNALS, signal.SIGHUP]  # SIGHUP: the terminal was closed
        handled = [s for s in wanted if signal.getsignal(s) != signal.SIG_IGN]  # nohup ignores SIGHUP; respect that
        before = {number: signal.signal(number, self._on_signal) for number in handled}
        if stop():
            self.stop_requested_at = time.monotonic()
        try:
            with Monitor(run_dir, shows_output=self.shows_output) as monitor:
                if self.node_rank == 0:
                    self.server = MetricsServer(run_dir, self.config["cluster"])
                follower = Follower(run_dir, self.loggers if self.node_rank == 0 else {})
                follower.start()
                attempt, again = 0, ""
                while True:
                    ranks = counted(self.num_ranks, "rank")
                    monitor.message(f"starting {ranks}{again}; logs in {short_path(run_dir / 'logs')}")
                    code = self._run_once(run_dir, monitor)
                    if why := self._regroup(run_dir, code):
                        monitor.message(why)
                        again = f" {origin(run_dir)}"
                        continue
                    self.failures += [self.failure] if code not in (DONE, PREEMPTED) else []
                    if code != FAILED or self.stop_requested_at < math.inf:  # a bad configuration fails again
                        break
                    attempt += 1
                    if attempt > self.max_restarts:
                        break
                    again = f", restart {attempt} of {self.max_restarts}"
                    again += "" if is_script(self.config) else f" {origin(run_dir)}"
                    self._note_restart(run_dir, attempt, monitor)
                if self.ends_copies and (left := memory.remove_old(run_dir)):
                    monitor.message(left)
                # a stopped job is requeued after this, and must not reach its time limit before
                left_s = max(2.0, self.stop_requested_at + self.grace_s - time.monotonic())
                follower.finish(monitor.message, lambda: self.end_at_once, min(left_s, MOST_S))
            failed = code not in (DONE, PREEMPTED)
            print_summary(
                run_dir,
                status="failed" if failed else None,
                failure=self.failure if failed else None,
                attempts=causes.distinct(self.failures) if len(self.failures) > 1 else [],
                why=self._why(run_dir) if failed else "",
            )
            return code
        finally:
            if self.server:
                self.server.end()
            for number, handler in before.items():
                signal.signal(number, handler)

    def _why(self, run_dir: Path) -> str:
        try:
            return short_form(run_dir, self.failure)
        except Exception as error:  # the summary and the exit code matter more
            return f"unknown: the diagnosis failed with {type(error).__name__}: {error}"

    def _note_restart(self, run_dir: Path, attempt: int, monitor: Monitor) -> None:
        """Report why the last attempt failed, on screen and in the run folder: its failure notes are deleted next."""
        why = causes.one_line(self.failure)
        monitor.message(f"attempt {attempt} failed: {why}")
        if self.node_rank == 0:
            cause = {key: value for key, value in self.failure.items() if key != "traceback"}  # the log has it
            note_attempt(run_dir, "end", code=self.failure["exit_code"], why=why, failure=cause)
            note_attempt(run_dir, "start", attempt=attempt, **self.place())

    def _regroup(self, run_dir: Path, code: int) -> str:
        """Choose who takes part in the next attempt, if members left, were lost or shall join; return why, or ""."""
        if self.members is None or self.stop_requested_at < math.inf or code not in (PREEMPTED, FAILED):
            return ""
        lost = self.lost(run_dir) if code == FAILED else {}
        if code == FAILED and not lost:
            return ""
        change = self.members.change(run_dir, self.num_members, lost)
        (run_dir / SCALE_FILE).unlink(missing_ok=True)
        if not change or not self.choose(change.size, change.gone):
            return ""  # too few are left, or too few in the allocation: it ends as it would without a range
        note_attempt(run_dir, "end", code=code, why=change.why)
        note_attempt(run_dir, "start", attempt=True, **self.place())
        return f"{change.why}: continuing with {self.members.count(self.num_members)}"

    @property
    def loggers(self) -> dict[str, Any]:
        return self.config.get("logger", {})

    @property
    def num_members(self) -> int:
        return self.num_ranks // (self.members.ranks_each if self.members else 1)

    def place(self) -> dict[str, Any]:
        """Return where the ranks run, for attempts.jsonl."""
        raise NotImplementedError

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        """Request a stop. Schedulers send several signals; only a second Ctrl-C, at least 1 s later, ends at once."""
        now = time.monotonic()
        if number == signal.SIGINT and now > self.stop_requested_at + 1:
            self.end_at_once = True
        self.stop_requested_at = min(self.stop_requested_at, now)
        unread.stopping()

    def _run_once(self, run_dir: Path, monitor: Monitor) -> int:
        logs = run_dir / "logs"
        logs.mkdir(exist_ok=True)
        self.never_started, self.standstill, self.ended_first = False, None, []  # per attempt
        if self.node_rank == 0:
            of_ranks = [*logs.glob("failure-*.json"), *logs.glob("position-*.json"), run_dir / HANG_FILE]
            of_ranks += [*logs.glob("stopped-*"), *logs.glob("asks-*"), *logs.glob("address-*")]
            for old in (run_dir / STOP_FILE, run_dir / SCRIPT_STOP_AT, run_dir / "failure.json", *of_ranks):
                old.unlink(missing_ok=True)
            if self.members:
                self.members.forget(run_dir)
        past, files, began = read_summary(run_dir), AttemptFiles(run_dir), kernel_log.now()
        with open(logs / self.log_name, "ab") as log:
            position = log.tell()
            process = self.start(run_dir, log)
        try:
            killed_because = self._watch(process, run_dir, monitor, files)
        finally:
            if process.poll() is None:  # the supervisor itself is being torn down: kill the ranks too
                self.kill(process)
        returncode = process.wait()

        look_again(run_dir)  # rank 0 may have written from another node
        if is_script(self.config) and returncode == 0:
            return script_rank.conclude(run_dir, writes=self.node_rank == 0)
        summary = read_summary(run_dir)
        if returncode == PREEMPTED and not self.ranks_began:  # stopped while the launcher waited for room
            write_json(run_dir / "summary.json", summary | {"status": "preempted"})
            return PREEMPTED
        if summary != past and summary.get("status") in ("done", "preempted"):
            return DONE if summary["status"] == "done" else PREEMPTED
        if killed_because and self.standstill:
            self.failure = of_standstill(run_dir, self.standstill)
        elif killed_because:
            kind, source = ("start", self.log_name) if self.never_started else ("stopped", "rank-0.log")
            self.failure = failure(None, kind, killed_because, f"logs/{source}")
        else:
            output = (logs / self.log_name).read_bytes()[position:].decode(errors="replace")
            ended = self.ended_first or self.ended_well(output)
            first = first_failure(run_dir, self.killed_ranks(output), ended)
            self.failure = first or self._silence(run_dir, returncode, output)
            if first and first["rank"] is not None:
                self.failure = mismatch(run_dir, first, self.world_size) or first
            if self.standstill and self.standstill.ranks and is_timeout(self.failure):
                self.failure = of_standstill(run_dir, self.standstill)  # torch's own timeout names a rank that waited
        self.failure["kernel"] = kernel_log.since(began)
        if self.node_rank == 0:
            with contextlib.suppress(OSError):  # on a full disk, only the screen shows it
                write_json(run_dir / "failure.json", self.failure)
                # a run that is done stays so if it is not resumed after all
                if not (self.failure["exit_code"] == BAD_CONFIG and summary == past and past.get("status") == "done"):
                    write_json(run_dir / "summary.json", summary | {"status": "failed", "wall_s": wall_s(run_dir)})
        return int(self.failure["exit_code"])

    def _watch(self, process: Ranks, run_dir: Path, monitor: Monitor, files: AttemptFiles) -> str:
        """Show progress until the ranks have ended. If they had to be killed, return the reason."""
        deadline = math.inf
        because = ""
        started, look_at, looked, failed = time.monotonic(), 0.0, 0.0, False
        self.ranks_began = self.stepped = False
        watch = hang.HangWatch(run_dir, self.world_size, self.hang_timeout, self.ask_for_stacks)
        silence = script_rank.Silence(run_dir, self.hang_timeout) if is_script(self.config) else None
        while process.poll() is None:
            now = time.monotonic()
            if now >= look_at:
                monitor.poll()
                if self.server:
                    self.server.poll(monitor.message)
                self._look(run_dir, files)
                if not failed and files.has_failed():
                    failed = True
                    # on several hosts, a rank that ended without a note may have lost its node
                    ranks = range(self.world_size) if self.is_one_host else ()
                    self.ended_first = [rank for rank in ranks if hang.has_ended(run_dir, rank)]
                if not because and not failed and self._watches() and self._hangs(watch, monitor):
                    deadline, because = now, str(self.standstill)
                if not because and not failed and self.ranks_began and silence and (found := silence.look()):
                    monitor.message(found)
                    deadline, because = (now, found) if self.on_hang == "stop" else (deadline, because)
                looked, look_at = now, now + min(LOOK_S, (now - started) / 20)
            if not because and self.stop_requested_at < math.inf:
                (run_dir / STOP_FILE).touch()
                self.on_stop()
                deadline, because = now + self.grace_s, self._too_slow()
                saving = f"{self._at_stop()}, within {self.grace_s} s (Ctrl-C: end at once)"
                monitor.message(f"stop requested: {saving if process.poll() is None else 'no rank had started'}")
            elif not because and now == looked and self._is_rescaled(run_dir, monitor):
                deadline, because = now + self.grace_s, self._too_slow()
            elif deadline == math.inf and failed:
                # its peers may wait for it forever; an elastic run continues without a slow one
                deadline = now + PEERS_S * (1 if self.members else slowness())
            elif now > started + self.start_s and not self.ranks_began:
                self.never_started = True
                deadline, because = now, f"no rank had started after {now - started:.0f} s (cluster.start_s)"
            if self.end_at_once:
                deadline, because = now, "stopped twice: ended at once, without saving"
            if now >= deadline:
                self.kill(process)  # the ranks die with it, see die_with_parent
                process.wait()
                return because
            time.sleep(TICK_S)
        self._look(run_dir, files)
        return ""

    def _at_stop(self) -> str:
        saves = as_dict(self.config.get("checkpoint")).get("save", True)
        when = "after this step or the next"
        return f"saving {when}" if saves else f"ending {when}, without a checkpoint (checkpoint.save=false)"

    def _too_slow(self) -> str:
        return f"the run did not save within cluster.grace_s={self.grace_s} seconds"

    def _is_rescaled(self, run_dir: Path, monitor: Monitor) -> bool:
        """If `dtrain scale` asked for another number of members, let the ranks save and stop."""
        wanted = self.members.requested(run_dir) if self.members else None
        if self.members is None or wanted is None:
            return False
        if self.members.fit(wanted) in (0, self.num_members):
            (run_dir / SCALE_FILE).unlink(missing_ok=True)
            return False
        monitor.message(f"{self.members.count(wanted)} requested: saving after this step or the next")
        (run_dir / STOP_FILE).touch()  # and no signal, which means that a rank leaves
        return True

    def _look(self, run_dir: Path, files: AttemptFiles) -> None:
        self.ranks_began = self.ranks_began or files.has_started()
        if not self.stepped and files.has_stepped():
            self.stepped = True
            self.on_first_step(run_dir)

    def _watches(self) -> bool:
        """A user's own program does not say where it is."""
        return self.node_rank == 0 and not is_script(self.config)

    def _hangs(self, watch: hang.HangWatch, monitor: Monitor) -> bool:
        """Report a standstill; return whether to stop the attempt for it. A fault in the watch must not end the run."""
        try:
            found = watch.look()
        except Exception as error:
            monitor.message(f"the watch for hangs failed, and is off now: {type(error).__name__}: {error}")
            watch.look = lambda: None  # type: ignore[method-assign]
            return False
        self.standstill = watch.found
        if found is not None:
            monitor.message(f"{found}. All stacks: {short_path(watch.report)}")
        return found is not None and found.stop and self.on_hang == "stop"

    def _silence(self, run_dir: Path, returncode: int, output: str) -> dict[str, Any]:
        log = f"logs/{self.log_name}"
        if full := disk_space.shortage(run_dir, 2**20):
            return failure(None, "disk", f"{full}, then resume", log)
        tail = "\n".join(output.splitlines()[-15:])
        return failure(None, "launch", f"{Path(self.log_name).stem} ended with {returncode}\n{tail}", log)


def rank_module(config: Mapping[str, Any]) -> str:
    """Return the program of each rank: dtrain's training loop, or what runs the user's own."""
    return "dtrain.launch.script_rank" if is_script(config) else "dtrain.train.rank"


def hang_settings(cluster: dict[str, Any]) -> tuple[float | None, str]:
    """(timeout, what to do), also of a run from before these settings."""
    return cluster.get("hang_timeout"), cluster.get("on_hang", "stop")


def tie_to(parent: int) -> None:
    """Run in the child before it starts the ranks: die with the launcher, even if the launcher is already dead."""
    die_with_parent()
    file_handles.raise_limit()
    if os.getppid() != parent:
        os._exit(1)
