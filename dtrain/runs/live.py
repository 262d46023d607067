"""A run while it trains, from its files alone: each poll reads what was added since the last one. For `dtrain watch`.

The metrics of a run of any length take a bounded amount of memory: older points of a curve are thinned out, and of a
very long file only a part of the lines is parsed. Imports no torch.
"""

from __future__ import annotations

import itertools
import math
import os
import statistics
import threading
import time
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from dtrain.runs.folder import Tail, latest_checkpoint, parse_line, predicted, read_json
from dtrain.runs.metrics import NO_CURVE, OWN, system_files
from dtrain.runs.record import Record, load, run_name
from dtrain.runs.slurm_queue import Job
from dtrain.util.format import as_dict, finite
from dtrain.util.regular_file import open_regular

POINTS = 500  # of a curve; up to twice as many before they are thinned out
NAMES = 40  # different metrics: a run folder is untrusted
RECENT = 200  # steps of which all metrics are kept
PARSED = 4 << 20  # bytes of a metrics.jsonl that are parsed at the start; of a longer one, every n-th training line
END = 65536  # bytes at the end of a file that are always read
LOG_LINES = 200
PLAUSIBLE = 1e15  # a larger time or speed is from a damaged file
SAMPLES = 60  # of a node's system metrics
# seconds between two looks at a run's small files, at a run of a list, at folders, and between two SLURM queries
FILES_S, LISTED_S, RARELY_S, ASK_S = 2.0, 4.0, 10.0, 15.0


class BoundedCurve:
    """A curve of bounded length: of each group of neighbours, the smallest and the largest are kept, so spikes stay."""

    def __init__(self) -> None:
        self.x: list[float] = []
        self.y: list[float] = []
        self._size = 2  # points of a group
        self._group = 0  # points of the newest group so far

    def add(self, x: float, y: float) -> None:
        if self._group == self._size:
            self._group = 0
            if len(self.x) >= 2 * POINTS:
                self._size *= 2
                kept = [i for start in range(0, len(self.x), 4) for i in self._extremes(start, start + 4)]
                self.x, self.y = [self.x[i] for i in kept], [self.y[i] for i in kept]
        self.x.append(x)
        self.y.append(y)
        self._group += 1
        if self._group > 2:
            start = len(self.x) - 3
            (middle,) = {start, start + 1, start + 2}.difference(self._extremes(start, start + 3))
            del self.x[middle], self.y[middle]

    def _extremes(self, start: int, end: int) -> list[int]:
        """Return two indices of the part, in their order."""
        part = range(start, min(end, len(self.y)))
        return sorted({min(part, key=self.y.__getitem__), max(reversed(part), key=self.y.__getitem__)})


class LiveRun:
    """`poll` reads what is new; the attributes are what is known."""

    def __init__(self, run_dir: Path) -> None:
        self.run_dir = run_dir
        self.record = Record(run_dir, {}, {})
        self.status = ""
        self.job: Job | None = None
        self.plan: dict[str, float] = {}
        self.failure: dict[str, Any] = {}
        self.standstill: str | None = None
        self.checkpoint: tuple[int, float] | None = None  # its step, and when it was written
        self.phase = ""  # of rank 0
        self.nodes: dict[str, deque[dict[str, Any]]] = {}  # system metrics by node, the newest last
        self.log: deque[tuple[str, str]] = deque(maxlen=LOG_LINES)  # (file, line)
        self._files_at = self._rarely_at = -math.inf
        self.forget_metrics()
        self._metrics = Tail(run_dir / "metrics.jsonl")
        self._scanned = False
        self._logs: dict[str, Tail] = {}
        self._system: dict[str, Tail] = {}

    def forget_metrics(self) -> None:
        self.curves: dict[str, BoundedCurve] = {}
        self.recent: deque[dict[str, Any]] = deque(maxlen=RECENT)  # training lines
        self.evaluation: dict[str, Any] = {}
        self.ranks: dict[str, list[float]] = {}  # data_s, own_s and wait_s of each rank
        self.slow = ""  # the newest sentence about a slow rank

    @property
    def name(self) -> str:
        return str(self.record.summary.get("name") or self.record.launches.get("name") or run_name(self.run_dir))

    @property
    def row(self) -> dict[str, Any]:
        """The newest training line."""
        return self.recent[-1] if self.recent else {}

    @property
    def step(self) -> int | None:
        return self.row.get("step") if self.recent else None

    @property
    def total_steps(self) -> int | None:
        total = finite(self.record.summary.get("total_steps"))
        return int(total) if total else None

    @property
    def is_live(self) -> bool:
        return self.status.rstrip("?") in ("queued", "starting", "running") or bool(self.job and not self.job.ended)

    def recent_median(self, name: str) -> float | None:
        values = [finite(row.get(name)) for row in itertools.islice(reversed(self.recent), 50)]
        known = [value for value in values if value is not None and 0 <= value < PLAUSIBLE]
        return statistics.median(known) if known else None

    @property
    def eta_s(self) -> float | None:
        seconds, step, total = self.recent_median("step_s"), self.step, self.total_steps
        if not self.status.startswith("running") or self.standstill or None in (seconds, step, total):
            return None
        return seconds * max(0, total - step)  # type: ignore[operator]

    def poll(self, job: Job | None = None) -> bool:
        """Read what is new; return whether something is. job: what SLURM last reported of the run's job, if asked."""
        now, changed = time.monotonic(), self._read_metrics()
        is_due = now - self._files_at >= FILES_S or job != self.job
        if is_due:
            self._files_at, self.job = now, job
            changed |= self._read_files()
        if now - self._rarely_at >= RARELY_S:
            self._rarely_at = now
            changed |= self._read_folders()
        if is_due:
            changed |= self._read_system()
        return self._read_logs() or changed

    # ---- metrics.jsonl -----------------------------------------------------------------------------------------

    def _read_metrics(self) -> bool:
        if not self._scanned:
            self._scanned = self._scan()
            return self._scanned
        lines, again = self._metrics.read()
        if again:  # a resumed run dropped the steps after its checkpoint
            self.forget_metrics()
            self._scan()
            return True
        for line in lines:
            self._add(parse_line(line))
        return bool(lines)

    def _scan(self) -> bool:
        """Read the file from its start."""
        self._metrics = tail = Tail(self._metrics.path)
        try:
            with open_regular(tail.path) as file:
                size = os.fstat(file.fileno()).st_size
                every = size // PARSED + 1
                for i, line in enumerate(file):
                    if not line.endswith(b"\n"):  # it is still being written
                        break
                    tail.offset, tail.before = tail.offset + len(line), line[-64:]
                    # all evaluations and the like; they are few
                    if i % every == 0 or tail.offset > size - END or b'"loss"' not in line:
                        self._add(parse_line(line))
        except OSError:  # nothing written yet
            return False
        return True

    def _add(self, row: dict[str, Any]) -> None:
        step = row.get("step")
        if not isinstance(step, int) or not 0 <= step < 1 << 53:
            return
        if "loss" in row:
            self.recent.append(row)
        if "val_loss" in row or (OWN in row and "loss" not in row and "val_loss" not in self.evaluation):
            self.evaluation = row
        if "save_step" in row:
            self._rarely_at = -math.inf  # look for the checkpoint
        if isinstance(row.get("slow_text"), str):
            self.slow = row["slow_text"]
        for name in ("data_s", "own_s", "wait_s"):
            if isinstance(values := row.get(f"rank_{name}"), list):
                self.ranks[name] = [_seconds(value) for value in values]
        for name, value in row.items():
            if (y := finite(value)) is None or name in NO_CURVE or name.startswith(("slow_", "save_")):
                continue
            if name not in self.curves and len(self.curves) >= NAMES:
                continue
            self.curves.setdefault(name, BoundedCurve()).add(step, y)

    # ---- the other files ---------------------------------------------------------------------------------------

    def _read_files(self) -> bool:
        before = (self.record.launches, self.record.summary, self.status, self.standstill, self.phase, self.failure)
        run_dir, old = self.run_dir, self.record
        self.record = Record(run_dir, read_json(run_dir / "launch.json"), read_json(run_dir / "summary.json"), self.job)
        self.record.attempts  # noqa: B018  # read once
        self.status, self.standstill = self.record.shown_status, self.record.standstill
        self.failure = read_json(run_dir / "failure.json") if self.status in ("failed", "died") else {}
        self.phase = str(read_json(run_dir / "logs" / "position-0.json").get("phase") or "") if self.is_live else ""
        if not self.plan:
            self.plan = predicted(run_dir) or {}
        if not self.ranks and isinstance(ranks := self.record.summary.get("ranks"), list):
            for name in ("data_s", "own_s", "wait_s"):
                self.ranks[name] = [_seconds(as_dict(rank).get(name)) for rank in ranks]
        after = (self.record.launches, self.record.summary, self.status, self.standstill, self.phase, self.failure)
        return before != after or old.attempts != self.record.attempts

    def _read_system(self) -> bool:
        changed = False
        for node, tail in self._system.items():
            for sample in filter(None, map(parse_line, tail.read()[0])):
                self.nodes.setdefault(node, deque(maxlen=SAMPLES)).append(sample)
                changed = True
        return changed

    def _read_folders(self) -> bool:
        """Look for files that are new: nodes, logs and checkpoints."""
        for node, path in system_files(self.run_dir).items():
            if node not in self._system:
                self._system[node] = _near_end(path)
        names = ["batch.log", "srun.log", "starter.log", "torchrun.log", "rank-0.log"]
        names.append(Path(str(self.failure.get("log") or "rank-0.log")).name)
        found = [path for name in dict.fromkeys(names) if (path := self.run_dir / "logs" / name).is_file()]
        for path in sorted(found, key=lambda path: path.stat().st_mtime):  # the newest lines last
            if path.name not in self._logs:
                self._logs[path.name] = _near_end(path)
        newest, before = latest_checkpoint(self.run_dir), self.checkpoint
        self.checkpoint = None
        if newest:
            try:
                written = (newest / "manifest.json").stat().st_mtime
                self.checkpoint = int(newest.name.removeprefix("step-")), written
            except OSError:  # removed in the meantime
                pass
        return self.checkpoint != before

    def _read_logs(self) -> bool:
        before = len(self.log), self.log[-1] if self.log else None
        changed = False
        for name, tail in self._logs.items():
            for line in tail.read()[0][-LOG_LINES:]:
                if line.strip():
                    self.log.append((name, line[:2000].decode(errors="replace")))
                    changed = True
        return changed or before != (len(self.log), self.log[-1] if self.log else None)


class Glance:
    """What a list of runs shows of one: its status, its newest metrics, and a few losses of its whole length."""

    def __init__(self, run_dir: Path) -> None:
        self.run_dir = run_dir
        self.record = Record(run_dir, {}, {})
        self.status = ""
        self.row: dict[str, Any] = {}  # the newest metrics of any kind
        self.losses: list[float] = []
        self._tail = Tail(run_dir / "metrics.jsonl")
        self._tail.skip(4 * END)
        self._sampled_at = 0  # size of the file
        self._read_at = -math.inf

    @property
    def is_live(self) -> bool:
        return self.status.rstrip("?") in ("queued", "starting", "running")

    def poll(self, job: Job | None = None) -> bool:
        now = time.monotonic()
        if now - self._read_at < (LISTED_S if self.is_live else RARELY_S) and job == self.record.job:
            return False
        self._read_at = now
        before = (self.status, dict(self.row))
        lines, again = self._tail.read()
        if again:
            self.row = {}
        for i, line in enumerate(lines, 1):
            if b'"loss"' not in line or i > len(lines) - 4:  # evaluations, and the newest step
                self.row.update(parse_line(line))
        folder = self.run_dir
        self.record = Record(folder, read_json(folder / "launch.json"), read_json(folder / "summary.json"), job)
        self.status = self.record.shown_status
        size = self._tail.offset
        if size > 1.02 * self._sampled_at or again:
            self._sampled_at, self.losses = size, sampled(self._tail.path, "loss")
        return before != (self.status, self.row)


class Queue:
    """SLURM's view of the runs, asked for in a thread: an answer may take seconds."""

    def __init__(self) -> None:
        self.jobs: dict[Path, Job | None] = {}
        self.problem = ""
        self._thread: threading.Thread | None = None
        self._asked, self._asked_for = -math.inf, frozenset[Path]()

    def poll(self, run_dirs: Sequence[Path], wait: bool = False) -> None:
        """Ask about these runs, unless that was done a short while ago. wait: until the answer is there."""
        now, wanted = time.monotonic(), frozenset(run_dirs)
        is_due = now - self._asked >= ASK_S or wanted - self._asked_for
        if wanted and is_due and not (self._thread and self._thread.is_alive()):
            self._asked, self._asked_for = now, wanted
            self._thread = threading.Thread(target=self._ask, args=(sorted(wanted),), daemon=True)
            self._thread.start()
        if wait and self._thread:
            self._thread.join()

    def _ask(self, run_dirs: list[Path]) -> None:
        records, self.problem = load(run_dirs, ask_all=len(run_dirs) == 1)
        self.jobs.update({record.run_dir: record.job for record in records})


def sampled(path: Path, name: str, count: int = 64) -> list[float]:
    """Return values of a metric at about evenly spaced places of a file of JSON lines, without reading the rest."""
    try:
        with open_regular(path) as file:
            size = file.seek(0, os.SEEK_END)
            if size <= END:
                file.seek(0)
                return [value for line in file if (value := finite(parse_line(line).get(name))) is not None]
            found: list[float] = []
            for i in range(count):
                file.seek(size * i // count)
                file.readline()  # the rest of a line
                near = (finite(parse_line(line).get(name)) for line in itertools.islice(file, 3))
                found += itertools.islice((value for value in near if value is not None), 1)
            return found
    except OSError:  # nothing written yet
        return []


def _seconds(value: object) -> float:
    """Return a time of a rank, or 0 for what cannot be one."""
    found = finite(value)
    return found if found is not None and 0 <= found < PLAUSIBLE else 0.0


def _near_end(path: Path) -> Tail:
    tail = Tail(path)
    tail.skip(END)
    return tail
