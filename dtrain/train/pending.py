"""Read results one step late: while the GPU computes a step, Python reads the metrics of the previous one."""

from __future__ import annotations

import time
from dataclasses import dataclass

from dtrain.strategies.base import LateResult, StepResult


@dataclass(frozen=True)
class FinishedStep:
    """A step whose metrics are in host memory."""

    step: int
    samples: int
    lr: float
    data_s: float
    step_s: float
    loss: float
    grad_norm: float
    updated: bool
    overflow: bool
    spiked: bool


class PendingSteps:
    """Steps that have started but whose metrics are unread. On a GPU, the newest is read after the next one starts."""

    def __init__(self) -> None:
        self._steps: list[tuple[StepResult | LateResult, int, int, float, float]] = []
        self._started = 0.0  # start time of the oldest unread step
        self.waited_s = 0.0  # in the last `read`

    def begin(self) -> None:
        """Start timing a step. If another is pending, time counts from when the previous results were read."""
        if not self._steps:
            self._started = time.perf_counter()

    def add(self, result: StepResult | LateResult, step: int, samples: int, lr: float, data_s: float) -> None:
        self._steps.append((result, step, samples, lr, data_s))

    def read(self, all_of_them: bool) -> list[FinishedStep]:
        """Wait for and return the steps that can be read without idling the GPU, or all of them."""
        leave_newest = self._steps[-1][0].late and not all_of_them
        count = len(self._steps) - leave_newest
        asked = time.perf_counter()
        results = [step[0].read() for step in self._steps[:count]]
        self.waited_s = time.perf_counter() - asked
        if not results:
            return []
        now = time.perf_counter()
        step_s = (now - self._started) / count  # steps that were read in one wait share its time
        finished = []
        for r, (_, step, samples, lr, data_s) in zip(results, self._steps[:count], strict=True):
            values = (r.loss, r.grad_norm, r.updated, r.overflow, r.spiked)
            finished.append(FinishedStep(step, samples, lr, data_s, step_s, *values))
        self._steps, self._started = self._steps[count:], now
        return finished
