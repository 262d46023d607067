"""Whether an evaluation found the best model so far, so that its checkpoint is kept (checkpoint.keep_best)."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dtrain.checkpoint import ownership
from dtrain.config.run_file import Settings
from dtrain.errors import bad
from dtrain.runs.best import best_of, mode_of, rank_of
from dtrain.runs.folder import checkpoints
from dtrain.util.collective import from_rank_0


def rule_of(saves: Settings) -> tuple[str, str] | None:
    """Return the metric, and min or max; None: no checkpoint is kept for its metric."""
    metric = saves.keep_best
    return None if metric is None else (metric, mode_of(metric, saves.best_mode) or "min")


class Best:
    """The best value of the run so far. It is read from the checkpoints when the run starts or resumes."""

    def __init__(self, folder: Path, rule: tuple[str, str] | None) -> None:
        self.rule, self.step = rule, 0  # step: of the best evaluation
        self.value: float | None = None  # as rank_of gives it: smaller is better
        if rule:
            self.step, self.value = from_rank_0(lambda: newest_best(folder, *rule), f"reading {folder}")

    def evaluated(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Compare the metrics of an evaluation with the best so far. All ranks must call it."""
        if not self.rule:
            return
        metric, mode = self.rule
        if metric not in metrics:
            rule = f"evaluations of this run have no such metric; they have {', '.join(metrics)}"
            raise bad("checkpoint.keep_best", metric, rule, f"checkpoint.keep_best={next(iter(metrics))}")
        value = from_rank_0(lambda: rank_of(metrics[metric], mode), "comparing an evaluation with the best one")
        if value is not None and (self.value is None or value < self.value):
            self.step, self.value = step, value

    def summary(self) -> dict[str, Any]:
        if not self.rule or self.value is None:
            return {}
        metric, mode = self.rule
        return {"best": {"step": self.step, "metric": metric, "value": -self.value if mode == "max" else self.value}}


def newest_best(folder: Path, metric: str, mode: str) -> tuple[int, float | None]:
    metrics = {int(path.name[5:]): ownership.metrics_of(path) for path in checkpoints(folder)}
    step = best_of(metrics, metric, mode)
    return (0, None) if step is None else (step, rank_of(metrics[step].get(metric), mode))
