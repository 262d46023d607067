"""Which rank is slow, since when and why: a judgement over windows of a few steps, from the times of all ranks.

A rank's slowdown is its own work divided by the median of the others' (rank_times.py says what own work is). A single
slow window is noise or a one-off. A rank is named if it is clearly slow in most of its last windows, or slow for long.
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from dtrain.train.rank_times import BUSY, FIELDS

WALL, OWN, DATA, DELAY, THROTTLED, BLOCKED, STOPPED, SAVING = range(len(FIELDS))
SLOW, CLEAR = 1.3, 1.5  # slowdowns
CLEAR_WORK = 1.9  # CLEAR, if CPU time itself is longer: a busy hyperthread beside it does 1.6 for seconds
LEAST_SHARE = 0.1  # of the step time, that a slow rank must cost
FEW, OF = 3, 4  # a rank that is slow in so many of its last windows, and clearly so in their median, is named
LONG_S, MOSTLY = 30.0, 0.8  # time constant, and share of slow windows, that name a rank that is slow
AGAIN = 6  # windows that are not slow until a rank counts as recovered
NOISE = 3  # others' run-queue delay times this may be chance
MOST_WAIT = 0.3  # of a step: a GPU's host that waits longer for its GPU holds up nobody
MOST_EVENTS = 10  # per rank: a rank that is slow now and then must not fill the log
KEPT = 128  # windows of which the summary has medians

CAUSES = {
    "data": "its data arrive late",
    "quota": "the CPU quota of its cgroup is used up",
    "neighbour": "other processes use its CPU cores",
    "blocked": "its own code sleeps, reads or waits; logs/rank-{rank}.log says where",
    "stopped": "its process is stopped and continued (SIGSTOP)",
    "work": "it computes more slowly than the others, or has more to compute",
    "": "no single cause",
}


@dataclass
class Verdict:
    """A rank that is slow, or was until the step `until`."""

    rank: int
    since: int
    slowdown: float
    cause: str  # a key of CAUSES
    until: int | None = None

    def text(self, host: str) -> str:
        when = f"since step {self.since}" if self.until is None else f"from step {self.since} to {self.until}"
        verb = "is" if self.until is None else "was"
        why = CAUSES[self.cause].format(rank=self.rank)
        return f"rank {self.rank} ({host}) {verb} {self.slowdown:.1f}x as slow as the others {when}: {why}"


@dataclass
class _Rank:
    """What is remembered of a rank that was slow in its recent windows."""

    since: int
    last: int = 0  # slow step
    counted: deque[float] = field(default_factory=lambda: deque(maxlen=AGAIN))  # slowdowns; 0: not slow
    slowdowns: deque[float] = field(default_factory=lambda: deque(maxlen=50))
    excess: np.ndarray = field(default_factory=lambda: np.zeros(6))
    long: float = 0.0
    verdict: Verdict | None = None


class Judge:
    """`stages`: the pipeline stage of each rank. Only ranks of the same stage have the same work."""

    def __init__(self, stages: list[int], on_gpu: bool = False) -> None:
        self.on_gpu = on_gpu
        every = np.array(stages)
        self.groups = [np.flatnonzero(every == stage) for stage in sorted(set(stages))]
        self.alone = any(len(group) == 1 for group in self.groups)
        self.suspects: dict[int, _Rank] = {}
        self.verdicts: list[Verdict] = []
        self.one_offs = [0] * len(stages)
        self.events = [0] * len(stages)
        self._history: list[np.ndarray] = []
        self._stride = self._count = 0

    def add(self, first_step: int, last_step: int, times: np.ndarray) -> list[Verdict]:
        """Judge one window: an array of ranks × FIELDS. Return the verdicts that are new or have ended."""
        self._keep(times)
        if times[:, SAVING].any():  # a save in the background is not the same work on all ranks
            return []
        own = times[:, OWN]
        if not self.suspects and not self.alone and own.max() <= SLOW * own.min():
            return []
        slowdowns, counted = compare(times, self.groups, self.alone)
        matters = own * (1 - 1 / np.maximum(slowdowns, 1.0)) >= LEAST_SHARE * times[:, WALL]
        if self.on_gpu:
            matters &= times[:, WALL] - own <= MOST_WAIT * times[:, WALL]
        slow = np.where(matters & (counted >= SLOW), counted, 0.0)
        seconds = min(3.0, float(np.median(times[:, WALL])) * (last_step - first_step))
        if not self.suspects and not slow.any():
            return []
        excess, changed = excesses(times, self.groups, self.alone), []
        for rank in {*np.flatnonzero(slow).tolist(), *self.suspects}:
            suspect = self.suspects.setdefault(rank, _Rank(first_step + 1))
            of_rank = (float(slow[rank]), float(slowdowns[rank]), excess[rank])
            changed += self._update(rank, suspect, *of_rank, last_step, seconds)
        return changed

    def _update(
        self, rank: int, suspect: _Rank, counted: float, slowdown: float, excess: np.ndarray, step: int, seconds: float
    ) -> list[Verdict]:
        suspect.counted.append(counted)
        suspect.long += (1 - math.exp(-seconds / LONG_S)) * ((counted > 0) - suspect.long)
        if counted:
            suspect.last = step
            suspect.slowdowns.append(slowdown)
            suspect.excess = 0.8 * suspect.excess + excess
        recent = list(suspect.counted)
        verdict = suspect.verdict
        if verdict is None:
            few = [one for one in recent[-OF:] if one]
            limit = CLEAR_WORK if self._cause(suspect) == "work" else CLEAR
            clearly = len(few) >= FEW and statistics.median(few) >= limit
            if counted and (clearly or suspect.long >= MOSTLY):
                verdict = suspect.verdict = Verdict(rank, suspect.since, 0.0, "")
                self._describe(suspect)
                if self.events[rank] < MOST_EVENTS:
                    self.verdicts.append(verdict)
                return self._event(verdict)
            if recent[-2:] == [0, 0] and suspect.long < 0.3:
                self.one_offs[rank] += max(recent) >= CLEAR
                del self.suspects[rank]
        elif len(recent) == AGAIN and not any(recent):
            self._describe(suspect)
            verdict.until = suspect.last
            del self.suspects[rank]
            return self._event(verdict)
        elif counted:
            self._describe(suspect)
        return []

    def _event(self, verdict: Verdict) -> list[Verdict]:
        self.events[verdict.rank] += 1
        return [verdict] if self.events[verdict.rank] <= MOST_EVENTS else []

    def _describe(self, suspect: _Rank) -> None:
        assert suspect.verdict is not None
        suspect.verdict.slowdown = float(np.median(suspect.slowdowns))
        suspect.verdict.cause = self._cause(suspect)

    def _cause(self, suspect: _Rank) -> str:
        parts = np.maximum(suspect.excess, 0.0)
        largest = int(parts.argmax())
        return list(CAUSES)[largest] if parts[largest] > 0.5 * parts.sum() else ""

    def _keep(self, times: np.ndarray) -> None:
        """Remember every window, then every second one, every fourth …, so that memory is bounded."""
        self._count += 1
        if self._count % (1 << self._stride) == 0:
            self._history.append(times)
            if len(self._history) == KEPT:
                self._history, self._stride = self._history[1::2], self._stride + 1

    def exposed_comm_s(self) -> float | None:
        """Median over the windows of what communication adds to a step; None if it is not known."""
        found = [one for times in self._history if (one := exposed_comm_s(times, self.on_gpu)) is not None]
        return round(statistics.median(found), 6) if found else None

    def medians(self) -> list[dict[str, Any]]:
        """Per rank: median seconds per step of data, own work and waiting, and how many one-off slow windows."""
        if not self._history:
            return []
        middle = np.median(np.stack(self._history), axis=0)
        return [
            {
                "rank": rank, "data_s": round(float(row[DATA]), 6), "own_s": round(float(row[OWN]), 6),
                "wait_s": round(float(row[WALL] - row[OWN]), 6), "one_off": one_off,
            }
            for rank, (row, one_off) in enumerate(zip(middle, self.one_offs, strict=True))
        ]  # fmt: skip


def exposed_comm_s(times: np.ndarray, on_gpu: bool) -> float | None:
    """Seconds of a step in which even the rank that waits least is blocked in collectives.

    That rank is the slowest, or comes last: it waits for the messages themselves, and the others also for it. None, for
    not known, on a GPU, where the host does not see a stream wait, and where ranks compete for cores: waiting for a
    message and waiting for a core then overlap, and all of it would count as the rank's own time.
    """
    last = times[(times[:, WALL] - times[:, OWN]).argmin()]
    return None if on_gpu or last[DELAY] > BUSY * last[WALL] else float(last[WALL] - last[OWN])


def compare(times: np.ndarray, groups: list[np.ndarray], alone: bool) -> tuple[np.ndarray, np.ndarray]:
    """Slowdown of each rank, and the same without the run-queue delay that may be chance."""
    own, delay = times[:, OWN], times[:, DELAY] - times[:, THROTTLED]
    # where ranks compete for CPUs, which of them waits for one longer is chance, for seconds on end
    certain = own - np.minimum(delay, NOISE * median_of_others(delay))
    if alone:  # a stage on one rank: nobody has the same work, so each is compared with its own computing
        work = np.maximum(own - times[:, [DATA, DELAY, BLOCKED, STOPPED]].sum(axis=1), 0.05 * own)
        usual = median_of_others(own / work)
        return own / work / usual, certain / work / usual
    usual = np.empty_like(own)
    for group in groups:
        usual[group] = np.maximum(median_of_others(own[group]), 1e-9)
    return own / usual, certain / usual


def excesses(times: np.ndarray, groups: list[np.ndarray], alone: bool) -> np.ndarray:
    """By how many seconds each rank's parts exceed the others', in the order of CAUSES."""
    data, delay, throttled, blocked, stopped = times[:, [DATA, DELAY, THROTTLED, BLOCKED, STOPPED]].T
    work = np.zeros_like(data) if alone else times[:, OWN] - data - delay - blocked - stopped
    parts = np.stack([data, throttled, delay - throttled, blocked, stopped, work])
    found = np.empty_like(parts.T)
    for group in [np.arange(len(times))] if alone else groups:
        found[group] = (parts[:, group] - np.stack([median_of_others(part) for part in parts[:, group]])).T
    return found


def median_of_others(values: np.ndarray) -> np.ndarray:
    """For each value, the median of all others."""
    count = len(values) - 1
    order = values.argsort(kind="stable")
    ordered = values[order]
    place = np.empty(count + 1, dtype=int)
    place[order] = np.arange(count + 1)
    low, high = (count - 1) // 2, count // 2  # the middle of the others; from a value's own place on, one further
    return (ordered[low + (low >= place)] + ordered[high + (high >= place)]) / 2
