"""Check that a user's own model and its loss fit together."""

from __future__ import annotations

import ast
from typing import Any

from dtrain.config.schema import class_source
from dtrain.errors import bad
from dtrain.models.losses import FIX, OWN


def check(config: dict[str, Any]) -> None:
    """Reject a model that returns no loss, and a loss where only the model's own loss is possible."""
    loss, model, strategy = config["loss"], config["model"]["_target_"], config["strategy"]
    smoothing = loss.get("label_smoothing")
    if isinstance(smoothing, (int, float)) and not 0 <= smoothing < 1:
        raise bad("loss.label_smoothing", smoothing, "must be at least 0 and less than 1", "loss.label_smoothing=0.1")
    chosen = config["choices"].get("loss") or loss["_target_"]
    if loss["_target_"] == OWN:
        names = None if model.startswith("dtrain.") else arguments_of(model, "forward")
        if names is not None and len(names) == 1:
            rule = f"{model.rpartition('.')[2]}.forward({names[0]}) takes no targets, so nothing computes a loss"
            raise bad("loss", "own", rule, FIX)
    elif strategy.get("loss_parallel"):
        rule = f"shards the outputs, but loss={chosen} needs whole outputs"
        raise bad("strategy.loss_parallel", "true", rule, "strategy.loss_parallel=false, or loss=own")
    elif "schedule" in strategy and strategy.get("pp") != 1:
        rule = "the last pipeline stage must compute the loss itself"
        raise bad("loss", chosen, rule, "loss=own with a model that returns its loss, strategy.pp=1, or strategy=fsdp")


def arguments_of(target: str, method: str) -> list[str] | None:
    """Read a method's arguments, without self, from its source; None: not decidable without importing the module."""
    found = class_source(target)
    for item in found.body if found else ():
        if isinstance(item, ast.FunctionDef) and item.name == method and not item.args.vararg:
            return [a.arg for a in (*item.args.posonlyargs, *item.args.args)][1:]
    return None
