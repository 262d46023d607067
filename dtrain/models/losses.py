"""Losses for models that only return outputs: `loss(outputs, targets)`. Ours, and many others, return the loss.

The launcher also imports this file, and must not import torch.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from dtrain.errors import bad
from dtrain.runs import causes
from dtrain.runs.source_lines import at_def, at_return, gradient_cuts, source
from dtrain.util.format import kind_of

if TYPE_CHECKING:
    from torch import Tensor

OWN = "dtrain.models.losses.own"
FIX = (
    "loss=cross_entropy, or loss=mse, or one of your own (docs/your-own.md), or a forward(inputs, targets) that "
    "returns it"
)
IGNORED = -100  # torch's ignore_index
CLASSES = re.compile(r"(cross_entropy|nll_loss|CrossEntropyLoss|NLLLoss)")
UNLIKE = re.compile(r"must be the same|can't be cast to the desired|same dtype")
NUMBERS = re.compile(r"(mse|l1|smooth_l1|huber)_loss|(MSE|L1|SmoothL1|Huber)Loss")  # elementwise losses of torch


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
        raise mismatch("cross_entropy", outputs, targets)
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
        raise mismatch("mse", outputs, targets)
    return F.mse_loss(outputs.float(), targets.float())


def only_tensors(name: str, outputs: Any) -> None:
    if not hasattr(outputs, "shape"):
        raise no_tensor(name, outputs)


def no_tensor(name: str, outputs: Any) -> ValueError:
    gave = "nothing (None): is a `return` missing?" if outputs is None else kind_of(outputs)
    fix = "return one tensor from forward, or loss=my_module.my_loss(outputs, targets), which gets all of it"
    return bad("loss", name, f"the model's forward returned {gave}", fix)


def call(loss: Any, name: str, outputs: Any, targets: Any, **more: bool) -> Any:
    """Return loss(outputs, targets) of dtrain or torch; an error is about how the two fit, and says so."""
    if not hasattr(outputs, "shape") or not hasattr(targets, "shape"):
        return loss(outputs, targets, **more)
    try:
        return loss(outputs, targets, **more)
    except (IndexError, RuntimeError, ValueError) as error:
        text = str(error)
        of_classes = CLASSES.fullmatch(name) and not takes_classes(outputs, targets)
        better: Exception | None = None
        if "out of bounds" in text:
            better = out_of_range(loss, name, outputs, targets)
        elif "\n  fix: " not in text and (of_classes or UNLIKE.search(text)):
            better = mismatch(name, outputs, targets)
        if better is None:
            raise
        raise better from error


def call_own(loss: Any, name: str, outputs: Any, targets: Any, forward: Any = None, **more: bool) -> Any:
    """Return loss(outputs, targets) of the user. If it fails: look whether its arguments are swapped, or what forward
    returned is no tensor, or there are no targets. forward: of the model, whose line a message shows."""
    try:
        return loss(outputs, targets, **more)
    except (AttributeError, IndexError, RuntimeError, TypeError, ValueError) as error:
        function = getattr(loss, "forward", getattr(loss, "func", loss))
        if "numpy() on Tensor" in str(error):  # torch's advice there is detach()
            raise without_gradient("loss", name, "numpy computes no gradient", function) from error
        # not if memory was short, or a check of the user's found a bad value
        if "\n  fix: " in str(error) or causes.is_users_own(error) or works(loss, outputs, targets, **more):
            raise
        if outputs is None:
            rule = "the model's forward returned nothing (None): is a `return` missing?"
            raise at_return(bad("loss", name, rule, "return the outputs from forward"), forward) from error
        if hasattr(targets, "shape") and list(targets.shape[1:]) == [0] and uses_second(function):
            rule = f"returns no targets, which loss={name} needs"
            raise bad("data", "…", rule, "return (inputs, targets)") from error
        for part, found in parts(outputs):
            if works(loss, found, targets, **more):
                rule = f"the model's forward returned {kind_of(outputs)}, and the loss works with {part} alone"
                fix = f"return that tensor from forward, or take it in the loss: outputs = {part}"
                raise at_return(bad("loss", name, rule, fix), forward) from error
        if not works(loss, targets, outputs, **more):
            raise
        rule = "fails as it is called, with the outputs first and then the targets, and works with the two swapped"
        first = "self, " if hasattr(loss, "forward") else ""
        fix = f"swap its arguments: def {getattr(function, '__name__', name)}({first}outputs, targets)"
        raise at_def(bad("loss", name, rule, fix), function) from error


def parts(outputs: Any) -> list[tuple[str, Any]]:
    """Return the tensors in what forward returned, and how a loss takes each of them."""
    if isinstance(outputs, dict):  # also one of Hugging Face
        return [(f"outputs[{key!r}]", part) for key, part in outputs.items() if hasattr(part, "shape")]
    if isinstance(outputs, (tuple, list)):
        return [(f"outputs[{i}]", part) for i, part in enumerate(outputs) if hasattr(part, "shape")]
    return []


def uses_second(function: Any) -> bool:
    """Does a function of the user read its second argument, the targets?"""
    found = source(function)
    names = [a.arg for a in found[1].args.args if a.arg != "self"] if found and hasattr(found[1], "args") else []
    return len(names) > 1 and any(isinstance(n, ast.Name) and n.id == names[1] for n in ast.walk(found[1]))  # type: ignore[index]


def works(loss: Any, *arguments: Any, **more: bool) -> bool:
    import torch

    from dtrain.util.collective import Alone

    try:
        with torch.no_grad(), Alone():
            value = loss(*arguments, **more)
    except Exception:
        return False
    return isinstance(value, torch.Tensor) and value.dim() == 0


def without_gradient(key: str, name: str, what: str, function: Any) -> ValueError:
    """Return the error of a loss or of outputs that depend on no weight. function: made what is without a gradient."""
    cuts, counts, line = gradient_cuts(function)
    where = f" in line {line}" if line else ""
    fix = "compute it from the weights: without .detach(), .item(), .numpy(), torch.no_grad() and torch.tensor(…)"
    if cuts:
        fix = f"leave out {' and '.join(cuts)}{where}" + ", and compute with torch" * (".numpy()" in cuts)
    elif counts:
        fix = f"{' and '.join(counts)}{where} only count: loss=cross_entropy, and the count as a metric of a hook"
    return at_return(bad(key, name, f"{what}, so nothing would be trained", fix), function)


def check_pairs(name: str, outputs: Any, targets: Any) -> None:
    """Reject different shapes: a loss in NUMBERS would only warn, and broadcast one of them."""
    if hasattr(outputs, "shape") and hasattr(targets, "shape") and outputs.shape != targets.shape:
        raise mismatch(name, outputs, targets)


def mismatch(name: str, outputs: Tensor, targets: Tensor) -> ValueError:
    """Return the error of outputs and targets whose shapes or dtypes do not fit. A fix "give …" is one of the data."""
    shapes = f"outputs are {described(outputs)} and targets {described(targets)}"
    of_classes, is_float = bool(CLASSES.fullmatch(name)), targets.is_floating_point()
    one_each = targets.shape in (outputs.shape[:-1], (*outputs.shape[:1], *outputs.shape[2:]))
    wanted = "class scores and, for each set of them, one class number" if of_classes else "a number for each output"
    fix = "change the model's outputs or the data's targets"
    if outputs.dim() == 2 and targets.dim() == 2 and len(outputs) == targets.numel() > len(targets):
        fix = f"outputs of shape {[*targets.shape, outputs.shape[1]]}: without .view(-1, …) in forward"
    elif outputs.dim() > 1 and outputs.shape[:1] != targets.shape[:1] and targets.shape[0] in outputs.shape[1:]:
        fix = f"{targets.shape[0]} samples in the first dimension of the outputs: .transpose(0, 1) in forward"
    elif outputs.dim() > 1 and outputs.shape[:1] != targets.shape[:1]:
        fix = f"{targets.shape[0]} samples in the first dimension of the outputs (nn.LSTM, nn.GRU: batch_first=True)"
    if of_classes and is_float and 1 in (outputs.dim(), outputs.shape[-1]):
        fix = "loss=mse, to predict these numbers"
    elif not outputs.is_floating_point():
        fix = "return the scores from forward, floating point numbers: without argmax, .long() and comparisons"
    elif of_classes and outputs.dim() == 1:
        fix = "as many outputs for each sample as there are classes"
    elif of_classes and one_each and is_float:
        fix = f"give the targets as class numbers, .long(): they are {targets.dtype}"
    elif of_classes and one_each:  # torch has the classes in the second dimension
        fix = "loss=cross_entropy, which also takes the classes in the last dimension"
    elif of_classes and targets.shape == outputs.shape and not is_float:
        one = ".int()" * (str(targets.dtype) == "torch.bool") + ".argmax(-1)"
        one = one if targets.dim() == 2 else "the number of the largest entry"
        fix = f"give the targets as class numbers, {one}; or .float() of them and loss=torch.nn.CrossEntropyLoss"
    elif of_classes and targets.shape == outputs.shape:
        fix = "loss=torch.nn.CrossEntropyLoss, for floating point probabilities; or class numbers, targets.argmax(-1)"
    elif of_classes and (*outputs.shape[:-1], 1) == targets.shape:
        fix = f"give the targets without their last dimension: .squeeze(-1){'.long()' * is_float}"
    elif of_classes and is_float:
        fix = "targets of one class number for each sample; or, to predict these numbers, as many outputs and loss=mse"
    elif outputs.shape == targets.shape and not is_float:
        fix = f"give the targets as floating point numbers, .float(): they are {targets.dtype}"
    elif outputs.shape[:-1] == targets.shape and not is_float and outputs.shape[-1] > 1:
        fix = f"loss=cross_entropy, if the targets are class numbers ({targets.dtype})"
    elif outputs.shape == (*targets.shape, 1):
        fix = "outputs.squeeze(-1) in forward, or targets[:, None] from the data"
        fix += "" if is_float else "; and the targets as floating point numbers, .float()"
    elif outputs.dim() == 3 and targets.shape == outputs.shape[:1] and not is_float:  # of a recurrent net
        fix = "one set of scores for each sample: x[:, -1] or x.mean(1) of the sequence, before the last layer"
    return bad("loss", name, f"{shapes}, but it needs {wanted}", fix)


def takes_classes(outputs: Tensor, targets: Tensor) -> bool:
    """Return whether torch's cross-entropy takes them: classes are in the second dimension, or the only one."""
    shape = (*outputs.shape[:1], *outputs.shape[2:]) if outputs.dim() > 1 else ()
    return targets.shape == shape and not targets.is_floating_point()


def out_of_range(loss: Any, name: str, outputs: Tensor, targets: Tensor) -> ValueError | None:
    """Return the error of class numbers for which there is no score."""
    second = outputs.dim() > 2 and targets.shape != outputs.shape[:-1]
    scores, left_out = outputs.shape[1 if second else -1], getattr(loss, "ignore_index", IGNORED)
    counted = targets[targets != left_out]
    if not counted.numel():
        return None
    low, high = int(counted.min()), int(counted.max())
    if set(counted.unique().tolist()) == {-1, 1}:
        fix = f"give class numbers from 0, (targets + 1) // 2; or {left_out} in place of -1 if it is no class"
    elif low < 0:
        fix = (
            f"give {left_out} where there is no class: it is left out of the mean (torch's ignore_index); {low} is not"
        )
    elif low == 1 and high == scores:
        fix = "give class numbers that start at 0"
    else:
        fix = f"as many outputs as the data have classes, which are {high + 1} or more: this batch has class {high}"
    shapes = f"outputs are {described(outputs)} and targets {described(targets)}"
    rule = f"targets are {low} to {high}, but the model gives {scores} scores, for the classes 0 to {scores - 1}"
    return bad("loss", name, f"{rule} ({shapes})", fix)


def described(tensor: Tensor) -> str:
    return f"{list(tensor.shape)} of {tensor.dtype}"


def ready(loss: Any) -> Callable[..., Tensor] | None:
    """Return the loss section's object as loss(outputs, targets); None if the model has its own loss.

    A class is instantiated with its settings, like torch's losses; a function is called with them.
    """
    function = getattr(loss, "func", loss)
    if loss is None or function is own:
        return None
    made: Callable[..., Tensor] = loss() if isinstance(function, type) else loss
    return made
