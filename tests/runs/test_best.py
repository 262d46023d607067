"""Settings that follow a metric of the validation split."""

from __future__ import annotations

from typing import Any

import pytest

from dtrain.runs.best import EARLY_STOP, check_split


def config(metric: str = "val_loss", keep_best: str | None = None, eval_batches: int = 8) -> dict[str, Any]:
    hooks = {"early_stop": {"_target_": EARLY_STOP, "metric": metric}}
    return {"hooks": hooks, "checkpoint": {"keep_best": keep_best}, "train": {"eval_batches": eval_batches}}


def test_what_follows_the_validation_split_is_refused_without_one() -> None:
    with pytest.raises(
        ValueError, match=r"early_stop\.metric=val_loss: needs a validation split, and data=m\.D has none"
    ):
        check_split(config(), "m.D")
    with pytest.raises(ValueError, match=r"keep_best=val_accuracy: needs a validation split.*\n  fix: return .*train"):
        check_split(config("val_mine", "val_accuracy"), "m.D")
    check_split(config("val_mine", "mine"), "m.D")
    check_split(config() | {"hooks": None}, "m.D")


def test_a_hooks_own_evaluation_may_have_any_metric_but_the_loss() -> None:
    found = config("val_accuracy", "val_accuracy")
    found["hooks"]["Mine"] = {"_target_": "m.Mine"}
    check_split(found, "m.D")
    found["checkpoint"]["keep_best"] = "val_loss"
    with pytest.raises(ValueError, match="keep_best=val_loss: needs a validation split"):
        check_split(found, "m.D")
