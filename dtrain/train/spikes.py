"""Loss spikes: detect a step whose loss or gradient norm is far above the recent ones, and write its samples down.

The limits of a step come from the steps before it, and the strategy compares with them before the update
(strategies/base.py), so all ranks agree, and a spike makes no update (DeepSpeed's engine makes it).
"""

from __future__ import annotations

import json
import math
import statistics
import time
from collections import deque
from pathlib import Path
from typing import Any

import torch

from dtrain.data.loader import Loader
from dtrain.data.stream_loader import StreamLoader
from dtrain.strategies.base import Strategy
from dtrain.train.pending import FinishedStep
from dtrain.train.process import log

WINDOW, LEAST = 100, 20  # recent steps that count, and how many are needed
# A limit is the median plus the larger of FACTOR standard deviations, estimated from the median absolute deviation, and
# FLOOR times the median.
FACTOR, FLOOR = 10.0, 0.2
SIGMA = 1.4826  # standard deviations of a normal distribution per median absolute deviation
DELAY = 2  # on a GPU, the step before is not read yet when a step starts; a resume must not know more than that
MOST_IN_A_ROW = 5  # more are no spikes: the data or the model have changed
FILE = "spikes.jsonl"


class SpikeError(RuntimeError):
    """Loss or gradient norm spiked, and the run stops."""


class Spikes:
    """The recent steps of a run, and the samples that a rollback passes over. `saved`: of a checkpoint's manifest."""

    def __init__(self, action: str | None, strategy: Strategy, saved: dict[str, Any]) -> None:
        self.action, self.strategy = action, strategy
        self.rollback_from: FinishedStep | None = None  # a spike after which the run has to go back
        self.restore(saved)
        if action:
            strategy.limits = torch.full((2,), math.inf, device=strategy.device)

    def restore(self, saved: dict[str, Any]) -> None:
        self.recent = deque((tuple(entry) for entry in saved.get("recent", [])), maxlen=WINDOW + DELAY)
        self.in_a_row: int = saved.get("in_a_row", 0)
        self.passed_over: list[dict[str, int]] = list(saved.get("passed_over", []))
        self.limits: dict[int, tuple[float, float]] = {}  # of the steps that are not read yet

    def state(self) -> dict[str, Any]:
        """Return what a resume needs, for the checkpoint's manifest."""
        found: dict[str, Any] = {"passed_over": self.passed_over} if self.passed_over else {}
        return found | (
            {"recent": [list(entry) for entry in self.recent], "in_a_row": self.in_a_row} if self.action else {}
        )

    def next_samples(self, samples: int) -> int:
        """Return the position of the next batch: after the samples that are passed over."""
        for part in sorted(self.passed_over, key=lambda part: part["begin"]):
            if part["begin"] <= samples < part["end"]:
                samples = part["end"]
        return samples

    def set_limits(self, step: int) -> None:
        """Before a step: give the strategy its limits."""
        if self.strategy.limits is None:
            return
        known = [entry for entry in self.recent if entry[0] <= step - DELAY][-WINDOW:]
        self.limits[step] = tuple(limit([entry[i] for entry in known]) for i in (1, 2))  # type: ignore[assignment]
        for place, value in zip(self.strategy.limits, self.limits[step], strict=True):
            place.fill_(value)  # in place: a CUDA graph knows its address. No host sync

    def read(self, finished: FinishedStep, data: Loader | StreamLoader, folder: Path | None) -> None:
        """After a step was read: remember it, or act if it is a spike. Rank 0 has the folder, and writes it down."""
        limits = self.limits.pop(finished.step, (math.inf, math.inf))
        if not finished.spiked:
            if self.action and math.isfinite(finished.loss) and math.isfinite(finished.grad_norm):
                self.recent.append((finished.step, finished.loss, finished.grad_norm))
                self.in_a_row = 0
            return
        if self.rollback_from is not None:  # a later step, which the rollback undoes as well
            return
        self.in_a_row += 1
        begin = finished.samples - data.global_batch_size
        what = (
            f"step {finished.step}: loss {finished.loss:.6g} (limit {limits[0]:.6g}), gradient norm "
            f"{finished.grad_norm:.6g} (limit {limits[1]:.6g}): a spike"
        )
        action, problem = self.action, ""
        if self.in_a_row > MOST_IN_A_ROW:
            action, problem = "stop", f"; {self.in_a_row} in a row are not spikes, the loss or the data have changed"
        if any(part["step"] == finished.step for part in self.passed_over):
            action, problem = "stop", "; the run went back for a spike at this step before, and passed over its samples"
        if folder is not None:
            record = {
                "time": time.time(), "step": finished.step, "loss": finished.loss, "grad_norm": finished.grad_norm,
                "loss_limit": limits[0], "grad_norm_limit": limits[1], "action": action,
                "begin": begin, "end": finished.samples, "samples": data.global_indices(begin).tolist(),
            }  # fmt: skip
            with open(folder / FILE, "a") as file:
                file.write(json.dumps(record) + "\n")
        if action == "stop":
            others = "train.spike=skip or rollback" if self.action == "stop" else "train.spike=null"
            raise SpikeError(f"{what}{problem}. Fix: inspect its samples in {FILE}, a smaller optim.lr, or {others}")
        log.warning("%s; %s", what, "weights unchanged" if action == "skip" else "going back to the last checkpoint")
        if action == "rollback":
            self.rollback_from = finished

    def pass_over(self, finished: FinishedStep, batch_size: int) -> None:
        begin = finished.samples - batch_size
        self.passed_over.append({"step": finished.step, "begin": begin, "end": finished.samples})


def limit(values: list[float]) -> float:
    """Return the value above which the next one is a spike; inf if too few are known."""
    if len(values) < LEAST:
        return math.inf
    median = statistics.median(values)
    spread = statistics.median(abs(value - median) for value in values)
    return median + max(FACTOR * SIGMA * spread, FLOOR * abs(median))
