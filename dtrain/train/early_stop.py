"""The hook `hooks=early_stop`: end the run when a metric of the evaluations has stopped improving."""

from __future__ import annotations

import math
from typing import Any, Literal

from dtrain.errors import bad
from dtrain.train.hook_run import HookRun


class EarlyStop:
    def __init__(
        self,
        metric: str = "val_loss",
        mode: Literal["min", "max"] = "min",
        patience: int = 3,
        min_delta: float = 0.0,
    ) -> None:
        self.metric, self.mode, self.patience, self.min_delta = metric, mode, patience, min_delta
        self.best: float | None = None
        self.best_step = 0
        self.num_bad = 0  # evaluations in a row without an improvement

    def after_evaluation(self, run: HookRun) -> None:
        if self.metric not in run.metrics:
            known = ", ".join(name for name in run.metrics if isinstance(run.metrics[name], float))
            rule = "no evaluation of this run has this metric"
            raise bad("hooks.early_stop.metric", self.metric, rule, f"use one of {known}")
        value = run.metrics[self.metric]
        if math.isfinite(value) and (self.best is None or self.is_better(value, self.best)):
            self.best, self.best_step, self.num_bad = value, run.step, 0
        else:
            self.num_bad += 1
        if self.num_bad >= self.patience:
            best = f"{self.best:.6g} at step {self.best_step}" if self.best is not None else "it was never finite"
            times = "1 evaluation" if self.patience == 1 else f"{self.patience} evaluations"
            run.stop(f"{self.metric} has not improved for {times} (best: {best})")

    def is_better(self, value: float, than: float) -> bool:
        gain = than - value if self.mode == "min" else value - than
        return gain > self.min_delta

    def state_dict(self) -> dict[str, Any]:
        return {"best": self.best, "best_step": self.best_step, "num_bad": self.num_bad}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.best, self.best_step, self.num_bad = state["best"], state["best_step"], state["num_bad"]
