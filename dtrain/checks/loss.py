"""Check that a user's own model and its loss fit together."""

from __future__ import annotations

import ast
from typing import Any

from dtrain.config.source import class_source, place, source_of
from dtrain.errors import bad
from dtrain.models.losses import FIX, OWN

TARGETS = ("target", "targets", "label", "labels", "y")  # names of an argument of forward()


def check(config: dict[str, Any]) -> None:
    """Reject a model that returns no loss, and a loss where only the model's own loss is possible."""
    loss, model, strategy = config["loss"], config["model"]["_target_"], config["strategy"]
    smoothing = loss.get("label_smoothing")
    if isinstance(smoothing, (int, float)) and not 0 <= smoothing < 1:
        raise bad("loss.label_smoothing", smoothing, "must be at least 0 and less than 1", "loss.label_smoothing=0.1")
    chosen = config["choices"].get("loss") or loss["_target_"]
    if loss["_target_"] != OWN:
        check_calls(model, loss["_target_"], chosen)
    if loss["_target_"] == OWN:
        names = None if model.startswith("dtrain.") else arguments_of(model, "forward")
        forward = method_of(model, "forward")
        if forward and names and len(names) == 1 and names != ["batch"]:  # (inputs, targets), or a dict with both
            called = f"{model.rpartition('.')[2]}.forward({names[0]})"
            rule = f"{place(model, forward)}: {called} takes no targets, so nothing computes a loss"
            raise bad("loss", "own", rule, FIX)
    elif strategy.get("loss_parallel"):
        rule = f"shards the outputs, but loss={chosen} needs whole outputs"
        raise bad("strategy.loss_parallel", "true", rule, "strategy.loss_parallel=false, or loss=own")
    elif "schedule" in strategy and strategy.get("pp") != 1:
        rule = "the last pipeline stage must compute the loss itself"
        raise bad("loss", chosen, rule, "loss=own with a model that returns its loss, strategy.pp=1, or strategy=fsdp")


def check_calls(model: str, loss: str, chosen: str) -> None:
    """Reject a model or a loss that cannot be called with what it gets: the inputs; outputs and targets."""
    found = None if model.startswith("dtrain.") else method_of(model, "forward")
    required = found.args.args[1 : len(found.args.args) - len(found.args.defaults)] if found else []
    wants = [a.arg for a in required[1:] if a.arg in TARGETS]
    if wants:
        given = ", ".join(a.arg for a in required)
        assert found is not None
        needs = f"{place(model, found)}: {model.rpartition('.')[2]}.forward({given}) needs {wants[0]}"
        rule = f"calls the model with its inputs alone, but {needs}"
        raise bad("loss", chosen, rule, "loss=own if forward returns the loss, or a forward without them")
    function = None if loss.startswith("dtrain.") else source_of(loss)
    if isinstance(function, ast.FunctionDef) and not function.args.vararg:
        names = [a.arg for a in (*function.args.posonlyargs, *function.args.args)]
        if len(names) < 2:
            called = f"{place(loss, function)}: {function.name}({', '.join(names)})"
            rule = f"{called} is called with two arguments, outputs and targets"
            raise bad("loss", chosen, rule, f"def {function.name}(outputs, targets)")


def method_of(target: str, method: str) -> ast.FunctionDef | None:
    found = class_source(target)
    methods = (item for item in found.body if isinstance(item, ast.FunctionDef)) if found else iter(())
    return next((item for item in methods if item.name == method), None)


def arguments_of(target: str, method: str) -> list[str] | None:
    """Read a method's arguments, without self, from its source; None: not decidable without importing the module."""
    found = class_source(target)
    for item in found.body if found else ():
        if isinstance(item, ast.FunctionDef) and item.name == method and not item.args.vararg:
            return [a.arg for a in (*item.args.posonlyargs, *item.args.args, *item.args.kwonlyargs)][1:]
    return None
