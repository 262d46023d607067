"""Losses for models that only give outputs: `loss(outputs, targets)`. Ours, and many, give the loss themselves.

This file is also read by the launcher, which does not import torch.
"""

from __future__ import annotations

import ast
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from dtrain.config import bad
from dtrain.schema import class_source

if TYPE_CHECKING:
    from torch import Tensor

OWN = "dtrain.losses.own"
FIX = "loss=cross_entropy, loss=mse or one of your own (docs/your-own.md), or forward(inputs, targets) that gives it"


def own() -> None:
    """The model gives its loss itself, when it is called with targets."""


def cross_entropy(outputs: Tensor, targets: Tensor, training: bool = True, label_smoothing: float = 0.0) -> Tensor:
    """The mean over the targets that are not -100; in evaluation without smoothing, and with accuracy and top 5.

    Classes lie along the last dimension of the outputs, or, as torch has them, along the second.
    """
    from torch.nn import functional as F

    from dtrain.models import parts

    scores = outputs
    if scores.shape[:-1] != targets.shape and scores.dim() > 2:
        scores = scores.movedim(1, -1)
    if scores.shape[:-1] != targets.shape or targets.is_floating_point():
        raise mismatch(
            "cross_entropy", outputs, targets, "scores of classes and, for each set of them, one whole number"
        )
    if not training or not label_smoothing:
        return parts.classify(scores, targets, training)
    flat = scores.reshape(-1, scores.shape[-1]).float()
    return F.cross_entropy(flat, targets.reshape(-1), label_smoothing=label_smoothing)


cross_entropy.figures = ("accuracy", "top5")  # type: ignore[attr-defined]  # after the loss, in evaluation


def mse(outputs: Tensor, targets: Tensor) -> Tensor:
    """The mean of the squared differences; a last dimension of size 1 may be missing from the targets."""
    from torch.nn import functional as F

    if outputs.shape == (*targets.shape, 1):  # else torch would take every output with every target
        targets = targets.unsqueeze(-1)
    if outputs.shape != targets.shape:
        raise mismatch("mse", outputs, targets, "a number for each output")
    return F.mse_loss(outputs.float(), targets.float())


def mismatch(name: str, outputs: Tensor, targets: Tensor, wanted: str) -> ValueError:
    shapes = f"outputs are {list(outputs.shape)} and targets {list(targets.shape)} of {targets.dtype}"
    return bad("loss", name, f"{shapes}, and it takes {wanted}", "change the model's outputs or the data's targets")


def ready(loss: Any) -> Callable[..., Tensor] | None:
    """What config.build made of the loss section, as loss(outputs, targets); None when the model has its own.

    A class is made with its settings, as torch's losses are; a function is called with them.
    """
    function = getattr(loss, "func", loss)
    if loss is None or function is own:
        return None
    made: Callable[..., Tensor] = loss() if isinstance(function, type) else loss
    return made


# ---- before the launch ---------------------------------------------------------------------------------------


def check(config: dict[str, Any]) -> None:
    """Refuse a model that gives no loss, and a loss where only the model's own can be."""
    loss, model, strategy = config["loss"], config["model"]["_target_"], config["strategy"]
    smoothing = loss.get("label_smoothing")
    if isinstance(smoothing, (int, float)) and not 0 <= smoothing < 1:
        raise bad("loss.label_smoothing", smoothing, "must be at least 0 and less than 1", "loss.label_smoothing=0.1")
    chosen = config["choices"].get("loss") or loss["_target_"]
    if loss["_target_"] == OWN:
        names = None if model.startswith("dtrain.") else arguments_of(model, "forward")
        if names is not None and len(names) == 1:
            rule = f"{model.rpartition('.')[2]}.forward({names[0]}) takes no targets, so nothing gives a loss"
            raise bad("loss", "own", rule, FIX)
    elif strategy.get("loss_parallel"):
        rule = f"cuts the outputs, and loss={chosen} needs them whole"
        raise bad("strategy.loss_parallel", "true", rule, "strategy.loss_parallel=false, or loss=own")
    elif "schedule" in strategy and strategy.get("pp") != 1:
        rule = "the last stage of a pipeline must give the loss itself"
        raise bad("loss", chosen, rule, "loss=own with a model that does, strategy.pp=1, or strategy=fsdp")


def arguments_of(target: str, method: str) -> list[str] | None:
    """The arguments of a class's method, less self, from its source; None: cannot be told without importing it."""
    found = class_source(target)
    for item in found.body if found else ():
        if isinstance(item, ast.FunctionDef) and item.name == method and not item.args.vararg:
            return [a.arg for a in (*item.args.posonlyargs, *item.args.args)][1:]
    return None
