"""Check that a user's own model and its loss fit together."""

from __future__ import annotations

import ast
from typing import Any

from dtrain.checks.own_code import check_kind
from dtrain.config.source import class_source, inherited, place, source_of
from dtrain.errors import bad
from dtrain.models.losses import FIX, OWN

TARGETS = ("target", "targets", "label", "labels", "y")  # names of an argument of forward()
MODELS = ("model", "net", "network", "module")  # of a loss: no setting is one


def check(config: dict[str, Any]) -> None:
    """Reject a model that returns no loss, and a loss where only the model's own loss is possible."""
    loss, model, strategy = config["loss"], config["model"]["_target_"], config["strategy"]
    smoothing = loss.get("label_smoothing")
    if isinstance(smoothing, (int, float)) and not 0 <= smoothing < 1:
        raise bad("loss.label_smoothing", smoothing, "must be at least 0 and less than 1", "loss.label_smoothing=0.1")
    chosen = config["choices"].get("loss") or loss["_target_"]
    if loss["_target_"] != OWN:
        check_calls(model, loss["_target_"], chosen, set(loss))
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


def check_calls(model: str, loss: str, chosen: str, settings: set[str]) -> None:
    """Reject a model or a loss that cannot be called with what it gets: the inputs; outputs and targets.

    settings: those of the loss.
    """
    found = None if model.startswith("dtrain.") else method_of(model, "forward")
    required = found.args.args[1 : len(found.args.args) - len(found.args.defaults)] if found else []
    wants = [a.arg for a in required[1:] if a.arg in TARGETS]
    if wants:
        given = ", ".join(a.arg for a in required)
        assert found is not None
        needs = f"{place(model, found)}: {model.rpartition('.')[2]}.forward({given}) needs {wants[0]}"
        rule = f"calls the model with its inputs alone, but {needs}"
        raise bad("loss", chosen, rule, "loss=own if forward returns the loss, or a forward without them")
    if loss.startswith("dtrain."):
        return
    function = source_of(loss)
    if isinstance(function, ast.FunctionDef):
        check_loss_call(loss, chosen, function, settings, function.name)
    elif isinstance(function, ast.ClassDef):
        check_kind("loss", chosen, function, "a loss")
        method = inherited(loss, "forward") or inherited(loss, "__call__")
        if isinstance(method, ast.FunctionDef):
            check_loss_call(loss, chosen, method, set(), f"{function.name}.{method.name}", skip=1)
        elif method is False and inherited(loss, "__call__") is False:
            rule = f"{place(loss, function)}: the class {function.name} has no forward, so it computes no loss"
            raise bad("loss", chosen, rule, f"def forward(self, outputs, targets) in {function.name}")


def check_loss_call(
    loss: str, chosen: str, function: ast.FunctionDef, given: set[str], name: str, skip: int = 0
) -> None:
    """Reject a loss that cannot be called with two arguments. given: those that are settings."""
    args = function.args
    if args.vararg or function.decorator_list:
        return
    names = [a.arg for a in (*args.posonlyargs, *args.args)][skip:]
    where = f"{place(loss, function)}: {name}({', '.join(names)})"
    sketch = f"def {function.name}({'self, ' * skip}outputs, targets)"
    if len(names) < 2:
        raise bad("loss", chosen, f"{where} is called with two arguments, outputs and targets", sketch)
    keyword = [a.arg for a, default in zip(args.kwonlyargs, args.kw_defaults, strict=True) if default is None]
    required = [*names[: len(names) - len(args.defaults)][2:], *keyword]
    if more := [one for one in required if one not in given and one != "training"]:
        if more[0] in MODELS:
            fix = f"leave out {more[0]}: optim.weight_decay=1e-4 is an L2 norm; or loss=own, the model's own loss"
            raise bad("loss", chosen, f"{where}: a loss gets outputs and targets, and no model", fix)
        rule = f"{where} is called with outputs and targets, and {more[0]} has no value"
        first = "" if skip else f"loss.{more[0]}=…, or "
        raise bad("loss", chosen, rule, f"{first}a default in the signature: {more[0]}=…")


def method_of(target: str, method: str) -> ast.FunctionDef | None:
    found = inherited(target, method)
    return found if isinstance(found, ast.FunctionDef) else None


def arguments_of(target: str, method: str) -> list[str] | None:
    """Read a method's arguments, without self, from its source; None: not decidable without importing the module."""
    found = class_source(target)
    for item in found.body if found else ():
        if isinstance(item, ast.FunctionDef) and item.name == method and not item.args.vararg:
            return [a.arg for a in (*item.args.posonlyargs, *item.args.args, *item.args.kwonlyargs)][1:]
    return None
