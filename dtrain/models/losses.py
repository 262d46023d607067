"""Losses for models that only return outputs: `loss(outputs, targets)`. Ours, and many others, return the loss.

The launcher also imports this file, and must not import torch.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from dtrain.errors import bad

if TYPE_CHECKING:
    from torch import Tensor

OWN = "dtrain.models.losses.own"
FIX = (
    "loss=cross_entropy, or loss=mse, or one of your own (docs/your-own.md), or a forward(inputs, targets) that "
    "returns it"
)
FIX_SHAPES = "change the model's outputs or the data's targets"


def own() -> None:
    """The model itself returns its loss when it is called with targets."""


def cross_entropy(outputs: Tensor, targets: Tensor, training: bool = True, label_smoothing: float = 0.0) -> Tensor:
    """Return the mean over the targets that are not -100; in evaluation without smoothing, plus accuracy and top 5.

    Classes are along the outputs' last dimension or, as in torch, the second.
    """
    from torch.nn import functional as F

    from dtrain.models import layers

    only_tensors("cross_entropy", outputs)
    scores = outputs
    if scores.shape[:-1] != targets.shape and scores.dim() > 2:
        scores = scores.movedim(1, -1)
    if scores.shape[:-1] != targets.shape or targets.is_floating_point():
        fix = FIX_SHAPES
        if scores.shape[:-1] == targets.shape:
            fix = f"give the targets as class numbers, .long(): they are {targets.dtype}"
        elif (*scores.shape[:-1], 1) == targets.shape:
            fix = (
                f"give the targets without their last dimension: .squeeze(-1){'.long()' * targets.is_floating_point()}"
            )
        wanted = "class scores and, for each set of them, one class number"
        raise mismatch("cross_entropy", outputs, targets, wanted, fix)
    if not training or not label_smoothing:
        return layers.classify(scores, targets, training)
    flat = scores.reshape(-1, scores.shape[-1]).float()
    return F.cross_entropy(flat, targets.reshape(-1), label_smoothing=label_smoothing)


cross_entropy.eval_metrics = ("accuracy", "top5")  # type: ignore[attr-defined]


def mse(outputs: Tensor, targets: Tensor) -> Tensor:
    """Return the mean squared error; the targets may lack a last dimension of size 1."""
    from torch.nn import functional as F

    only_tensors("mse", outputs)
    if outputs.shape == (*targets.shape, 1):  # otherwise torch would broadcast every output against every target
        targets = targets.unsqueeze(-1)
    if outputs.shape != targets.shape:
        are_classes = outputs.shape[:-1] == targets.shape and not targets.is_floating_point()
        fix = f"loss=cross_entropy, if the targets are class numbers ({targets.dtype})" if are_classes else FIX_SHAPES
        raise mismatch("mse", outputs, targets, "one number for each output", fix)
    return F.mse_loss(outputs.float(), targets.float())


def only_tensors(name: str, outputs: Any) -> None:
    if not hasattr(outputs, "shape"):
        raise no_tensor(name, outputs)


def no_tensor(name: str, outputs: Any) -> ValueError:
    gave = "nothing (None): is a `return` missing?" if outputs is None else f"a {type(outputs).__name__}"
    fix = "return one tensor from forward, or loss=my_module.my_loss(outputs, targets), which gets all of it"
    return bad("loss", name, f"the model's forward returned {gave}", fix)


def mismatch(name: str, outputs: Tensor, targets: Tensor, wanted: str, fix: str) -> ValueError:
    shapes = f"outputs are {list(outputs.shape)} and targets {list(targets.shape)} of {targets.dtype}"
    return bad("loss", name, f"{shapes}, but it needs {wanted}", fix)


def ready(loss: Any) -> Callable[..., Tensor] | None:
    """Return the loss section's object as loss(outputs, targets); None if the model has its own loss.

    A class is instantiated with its settings, like torch's losses; a function is called with them.
    """
    function = getattr(loss, "func", loss)
    if loss is None or function is own:
        return None
    made: Callable[..., Tensor] = loss() if isinstance(function, type) else loss
    return made
