"""The follower: one process a run, which reads its files and feeds its trackers. Training never waits for it.

Each tracker has a thread, because a server that hangs must not hold up the others. After any error the tracker is
opened again, and asked what has arrived: so each step arrives once, whatever was killed or lost in between.
The supervisor holds the follower's stdin open; when it is closed, the rest is sent, within LAST_S seconds.
"""

from __future__ import annotations

import fcntl
import os
import signal
import sys
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from dtrain.config import run_file
from dtrain.config.build import build, typed_trust
from dtrain.config.redaction import hide
from dtrain.loggers.tracker import REST, SYSTEM, Held, Row, RunFacts, Tracker, numbers
from dtrain.runs.folder import Tail, launch_time, parse_line, parse_lines, read_json, write_json
from dtrain.runs.metrics import gpus_of, system_files
from dtrain.runs.protocol import STOP_SIGNALS, Deadline
from dtrain.util.format import finite

STATE = "logs/trackers.json"  # of each tracker: whether it has everything, and the last problem
LOG = "logs/trackers.log"
LAST_S = 15.0  # on an idle machine, after the ranks have ended, for what has not arrived yet
LOCAL_S = 60.0  # the same for files and databases: a new MLflow database takes 10 s, and is broken if it is cut off
LOOK_S = 1.0  # between two looks at the files
RETRY_S = (2.0, 300.0)  # first and longest wait before a tracker that failed is opened again: each try takes CPU time
BATCH = 20_000  # lines that are read, and rows that a tracker gets, at once


class Source:
    """The rows of a run that a tracker does not have yet, in order."""

    def __init__(self, run_dir: Path, held: Held, system: bool, every: int = 1) -> None:
        self.run_dir, self.held, self.system, self.every = run_dir, dict(held), system, every
        self.newest = max(held.values(), default=-1)
        self.skipped: tuple[int, float, dict[str, Any]] | None = None  # the newest step, if `every` leaves it out
        self.metrics, self.nodes = Tail(run_dir / "metrics.jsonl"), dict[str, Tail]()
        self.time = launch_time(read_json(run_dir / "launch.json")) or 0.0
        self.step = 0
        self.was_replaced = False  # a resumed run dropped lines

    def rows(self) -> Iterator[list[Row]]:
        """Yield batches of new rows."""
        lines, again = self.metrics.read()
        if again:
            self.was_replaced, self.step, self.skipped = True, 0, None
        samples = self._samples() if self.system else deque()
        for i in range(0, len(lines), BATCH):
            found: list[Row | None] = []
            for line in parse_lines(lines[i : i + BATCH]):
                before = self.step
                row = self._row(line)
                while samples and samples[0][0] < self.time:  # at the step after which it was taken: in order
                    found.append(self._new(before, *samples.popleft(), SYSTEM))
                found.append(row)
            if rows := [row for row in found if row]:
                yield rows
        if rest := [row for sample in samples if (row := self._new(self.step, *sample, SYSTEM))]:
            yield rest

    def _row(self, line: dict[str, Any]) -> Row | None:
        step = line.pop("step", None)
        if type(step) is not int or step < 0:
            return None
        # a run of an earlier version has no times: add up the steps
        self.time = finite(line.pop("time", None)) or self.time + (finite(line.get("step_s")) or 0.0) * max(
            0, step - self.step
        )
        self.step = max(step, self.step)
        if self.every > 1 and "step_s" in line:  # a training step: not an evaluation, and not a save
            self.skipped = (step, self.time, line) if step % self.every else None
            if self.skipped:
                return None
        saved = line.get("save_step")  # two saves may be reported at one step
        return self._new(saved if type(saved) is int else step, self.time, numbers(line), REST)

    def rest(self) -> list[Row]:
        """Return the last training step if it has been left out so far."""
        skipped, self.skipped = self.skipped, None
        row = self._new(skipped[0], skipped[1], numbers(skipped[2]), REST) if skipped else None
        return [row] if row else []

    def _samples(self) -> deque[tuple[float, dict[str, float]]]:
        """Return the new system metrics of all nodes, in the order of their times."""
        found = []
        for node, path in system_files(self.run_dir).items():
            lines, _ = self.nodes.setdefault(node, Tail(path)).read()
            for line in map(parse_line, lines):
                when = finite(line.pop("time", None))
                if when is not None:
                    found.append((when, {f"{SYSTEM}{node}/{key}": value for key, value in flat(line).items()}))
        return deque(sorted(found, key=lambda sample: sample[0]))

    def _new(self, step: int, when: float, values: dict[str, float], rest: str) -> Row | None:
        """Return a row of the values that the tracker does not have: it holds each metric up to some step."""
        held = self.held
        if step > self.newest:
            self.newest = step  # all of them are new
        else:
            below = held.get(rest, held.get(REST, -1))
            values = {key: value for key, value in values.items() if step > held.get(key, below)}
        held.update(dict.fromkeys(values, step))
        return Row(step, when, values) if values else None


def flat(sample: dict[str, Any]) -> dict[str, float]:
    """Return the numbers of a sample; of a GPU also whether it is throttled, and its newest error (XID)."""
    values = numbers(sample)
    for i, gpu in enumerate(gpus_of(sample)):
        number, throttle, xid = gpu.pop("index", i), gpu.pop("throttle", None), gpu.pop("xid", None)
        more = {"throttled": float(bool(throttle))} if isinstance(throttle, list) else {}
        more |= {"xid": xid[-1]} if isinstance(xid, list) and xid else {}
        values |= {f"gpu{number}/{key}": value for key, value in numbers(gpu | more).items()}
    return values


class Feed:
    """Feeds one tracker."""

    def __init__(self, name: str, section: dict[str, Any], run_dir: Path, trust: Sequence[str] = ()) -> None:
        self.name, self.run_dir = name, run_dir
        self.tracker: Tracker = build(section, [*typed_trust(), *trust])
        self.problem = ""
        self.done = False
        self.sent = 0

    def send(self, keep_on: Callable[[], bool] = lambda: False, pause: Callable[[], object] = lambda: None) -> None:
        """Send all rows, and go on while `keep_on` is true; then finish. Raises what the tracker raises."""
        tracker, source = self.tracker, self._open()
        while True:
            last = not keep_on()  # asked before the files are read: nothing is written after the end
            for rows in source.rows():
                if source.was_replaced and tracker.mirrors:
                    break
                self._log(rows)
            if source.was_replaced and tracker.mirrors:
                source = self._open()
                continue
            if last:
                self._log(source.rest())
            self.problem = ""
            if last:
                break
            pause()
        tracker.finish(RunFacts.read(self.run_dir))
        self.done = True

    def _open(self) -> Source:
        tracker = self.tracker
        every = getattr(tracker, "every", 1)  # a user's own tracker may not have it
        return Source(self.run_dir, tracker.open(RunFacts.read(self.run_dir)), tracker.takes_system, every)

    def _log(self, rows: list[Row]) -> None:
        if rows:
            self.tracker.log(rows)
            self.sent += len(rows)

    def follow(self, ended: threading.Event, look_s: float = LOOK_S) -> None:
        """Send rows until the run has ended, and start again after each error."""
        wait = RETRY_S[0]
        while not self.done:
            sent = self.sent
            try:
                with locked(self.run_dir, self.name, patience=lambda: time.sleep(0.5)):
                    self.send(lambda: not ended.is_set(), lambda: ended.wait(look_s))
            except BaseException as error:  # some libraries raise SystemExit
                known, self.problem = self.problem, one_line(error)
                details = "" if self.problem == known else f"\n{hide(traceback.format_exc())}"
                say(f"{self.name}: {self.problem}; again in {wait:.0f} s{details}")
                wait = RETRY_S[0] if self.sent > sent else min(2 * wait, RETRY_S[1])
                ended.wait(wait)
                if ended.is_set():
                    time.sleep(0.5)


def one_line(error: BaseException) -> str:
    lines = [line for line in str(error).splitlines() if line.strip()]
    return hide(f"{type(error).__name__}: {lines[0].strip() if lines else ''}")[:300]


def say(text: str) -> None:
    print(time.strftime("%F %T"), text, flush=True)


@contextmanager
def locked(run_dir: Path, name: str, patience: Callable[[], object] | None = None) -> Iterator[None]:
    """Let one process at a time send a run to a tracker: the follower of the last attempt may still be sending."""
    (run_dir / "logs").mkdir(exist_ok=True)
    with open(run_dir / "logs" / f".{name}.lock", "a") as file:
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if patience is None:
                    raise ValueError(
                        f"{run_dir}: another process is sending this run to {name}\n"
                        "  fix: nothing to do: it sends everything; or wait until it has ended"
                    ) from None
                patience()
            except OSError:  # a file system without locks
                break
        yield


def lower_priority() -> None:
    """Let the ranks come first."""
    os.nice(10)
    if os.getsid(0) == os.getpid():  # with autogroups, Linux applies nice only between the processes of one session
        with suppress(OSError):
            Path("/proc/self/autogroup").write_text("10")


def main(run_dir: Path) -> int:
    """Follow a run until stdin is closed; exit code 0: all trackers have everything."""
    lower_priority()
    for number in (*STOP_SIGNALS, signal.SIGHUP):  # a scheduler sends them to all processes of a job
        signal.signal(number, signal.SIG_IGN)
    sections = run_file.load(run_dir)["logger"]
    feeds = [Feed(name, dict(section), run_dir) for name, section in sections.items()]
    ended = threading.Event()
    threads = [threading.Thread(target=feed.follow, args=(ended,), daemon=True) for feed in feeds]
    say(f"following {run_dir} for {', '.join(sections)}")
    for thread in threads:
        thread.start()
    while os.read(0, 4096):
        pass
    ended.set()
    for remote, seconds in ((True, LAST_S), (False, LOCAL_S)):
        deadline = Deadline(seconds)
        for thread in (thread for thread, feed in zip(threads, feeds, strict=True) if feed.tracker.is_remote == remote):
            while thread.is_alive() and (left := deadline.left()) > 0:
                thread.join(min(left, seconds))
    state = {feed.name: {"complete": feed.done, "problem": feed.problem} for feed in feeds}
    write_json(run_dir / STATE, state)
    for feed in feeds:
        say(f"{feed.name}: {feed.sent} rows sent, {'complete' if feed.done else 'not complete ' + feed.problem}")
    return 0 if all(feed.done for feed in feeds) else 1


if __name__ == "__main__":
    code = main(Path(sys.argv[1]))
    sys.stdout.flush()
    os._exit(code)  # a thread may wait for a server that never answers
