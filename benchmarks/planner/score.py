"""How far predictions are off: a row's prediction beside what was measured, and what a set of rows comes to."""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache

from rows import CONF, Row

from dtrain.config.hardware import Hardware, load
from dtrain.plan.ledger import by_part

OURS = "dtrain"
PARTS = ("compute", "communication", "bubble", "optimizer", "data")


@dataclass(frozen=True)
class Scored:
    """A row and what the planner says of it."""

    row: Row
    parts: dict[str, float]  # seconds, and their total

    @property
    def predicted(self) -> float:
        return self.parts["total"]

    @property
    def error(self) -> float:
        """Of the measured step; above 0: the planner thinks it slower than it is."""
        return self.predicted / self.row.step_s - 1


@dataclass(frozen=True)
class Errors:
    """What a set of rows comes to, as shares of the measured step."""

    count: int
    mean: float  # of the absolute errors
    median: float
    worst: float
    bias: float  # mean with signs

    @classmethod
    def of(cls, errors: Iterable[float]) -> Errors:
        signed = list(errors)
        sizes = [abs(error) for error in signed]
        return cls(len(sizes), statistics.mean(sizes), statistics.median(sizes), max(sizes), statistics.mean(signed))


hardware = cache(load)  # by name


def why_not(row: Row) -> str:
    """Why a row cannot be predicted; "" when it can."""
    from dtrain.plan.time.stack import STACKS

    if not (CONF / "hardware" / f"{row.hardware}.yaml").exists():
        return f"conf/hardware/{row.hardware}.yaml is not there"
    return "" if row.stack in (OURS, *STACKS) else f"dtrain/plan/time/stack.py has no {row.stack}"


def score(row: Row) -> Scored:
    """The planner's word on a row, from the hardware file and the stack's description alone."""
    from dtrain.plan.time.stack import STACKS
    from dtrain.plan.time.step import step_time

    if row.stack == OURS:  # as the layout runs it, on the machine that was measured in the same hour
        return Scored(row, by_part(step_time(row.shape, row.layout, calibrated(row.hardware, row.launch_us))))
    return Scored(row, by_part(step_time(row.shape, row.layout, hardware(row.hardware), STACKS[row.stack])))


@cache
def calibrated(name: str, launch_us: float | None = None) -> Hardware:
    """The hardware file with the host of our own runs: its time for a launch differs from machine to machine."""
    if launch_us is not None:
        return load(name, launch_us=launch_us)
    figures = json.loads((CONF.parent / "benchmarks" / "results" / f"calibrate-{name}.json").read_text())["figures"]
    return load(name, launch_us=figures["launch_us"])


def score_all(rows: Iterable[Row]) -> tuple[list[Scored], list[str]]:
    """All rows that can be predicted, and for the others why not."""
    reasons = [(row, why_not(row)) for row in rows]
    return [score(row) for row, reason in reasons if not reason], [reason for _, reason in reasons if reason]


def with_one_point(scored: list[Scored]) -> Errors:
    """The errors when one row of each (GPU, stack) has been measured here and corrects the others.

    That row says how many times longer computing takes than predicted, all else being as predicted; it is left out.
    Which row that is decides much, so each is taken in turn, and the errors of all turns are put together.
    """
    errors: list[float] = []
    for pair in sorted({(one.row.hardware, one.row.stack) for one in scored}):
        rows = [one for one in scored if (one.row.hardware, one.row.stack) == pair]
        if len(rows) < 2:
            continue
        for point in rows:
            computing = point.parts["compute"]
            factor = (point.row.step_s - (point.predicted - computing)) / computing
            errors += [
                (one.predicted + (factor - 1) * one.parts["compute"]) / one.row.step_s - 1
                for one in rows
                if one is not point
            ]
    return Errors.of(errors)
