"""How a user's model is called with a batch, and what the loss is in that which it returns.

model(inputs, targets)                    forward(self, inputs, targets=None)
model(**batch)                            forward(self, input_ids, attention_mask=None, labels=None)
model(batch)                              forward(self, batch): the batch as the data set gives it
model(a, b, targets)                      forward(self, a, b, targets): samples of three
"""

from __future__ import annotations

import functools
import inspect
import logging
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from dtrain.data.fields import TARGETS, Fields, has_targets
from dtrain.errors import bad
from dtrain.models import losses
from dtrain.runs.source_lines import at_def, at_return
from dtrain.util.format import kind_of

log = logging.getLogger("dtrain")
MOST_INPUTS = 8  # arguments for which a message writes a forward(); more are numbers of one input
FIX = "return the loss, or an object with .loss or ['loss'], a tuple with it, or a dict of losses"


class Call:
    """Calls a model's own forward. `targets` is the name of its argument for them, None if it takes none by name."""

    def __init__(self, forward: Callable[..., Any], name: str) -> None:
        self.name = name
        parameters = list(inspect.signature(forward).parameters.values())
        named = [p for p in parameters if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
        self.names = [p.name for p in named]
        self.takes_any = any(p.kind is p.VAR_KEYWORD for p in parameters)
        self.takes_more = any(p.kind is p.VAR_POSITIONAL for p in parameters)
        self.required = [p.name for p in named if p.default is p.empty]
        self.function = forward
        self.positional = [p.name for p in named if p.kind is not p.KEYWORD_ONLY]
        self.target = next((name for name in TARGETS if name in self.names), None)
        self.takes_batch = self.names[:1] == ["batch"] or (len(self.names) == 1 and not self.takes_more)
        # forward(x, y): the second argument is the targets, whatever its name, if none has a usual name
        second = self.positional[1] if len(self.positional) > 1 else None
        self.in_second = second is not None and (second == self.target or self.target is None)

    def __call__(self, forward: Callable[..., Any], inputs: Any, targets: Any = None) -> Any:
        given = targets is not None and has_targets(targets)
        targets = plain(targets)
        if isinstance(inputs, Fields):
            return self.with_fields(forward, inputs, targets if given else None)
        if not given:
            return forward(inputs)
        if self.names == ["batch"]:
            return forward((inputs, targets))
        if self.in_second or self.target is None:
            return forward(inputs, targets)
        return forward(inputs, **{self.target: targets})

    def with_fields(self, forward: Callable[..., Any], inputs: Fields, targets: Any) -> Any:
        beside = {} if targets is None else {self.target or inputs.target or "labels": targets}
        if isinstance(inputs.values, tuple):
            if self.names == ["batch"]:
                return forward((*inputs.values, targets))
            by_name = self.target is not None and self.target not in self.positional[: len(inputs.values) + 1]
            return forward(*inputs.values, **beside) if by_name else forward(*inputs.values, *beside.values())
        values = inputs.values
        taken = {name: value for name, value in values.items() if name in self.names}
        if self.takes_batch and not taken:
            if self.names != ["batch"] and len(values) == 1 and targets is None:  # forward(x), of an image and a label
                return forward(*values.values())
            return forward(values if targets is None else values | {inputs.target or "labels": targets})
        return forward(**taken, **(beside if self.target or self.takes_any else {}))

    def check(self, inputs: Any, with_targets: bool = True, reader: Any = None) -> None:
        """Before the first step: reject a batch that the model does not take, and log which fields it does not use.

        with_targets: the model computes the loss, so it gets the targets, too. reader: gives the samples, for messages.
        """
        given = 1 + with_targets
        if not isinstance(inputs, Fields) and len(self.required) > given:
            rule = (
                f"{self.name}.forward({', '.join(self.names)}) needs {self.required[given]}, and a batch has one input"
            )
            fix = f"a default for {self.required[given]}, or data that return ((x, {self.required[given]}), targets)"
            raise at_def(bad("model", self.name, rule, fix), self.function)
        if isinstance(inputs, Fields) and isinstance(inputs.values, tuple) and not self.takes_more:
            self._check_parts(inputs.values, with_targets, reader)
        if not isinstance(inputs, Fields) or isinstance(inputs.values, tuple) or self.takes_batch:
            return
        unused = [name for name in inputs.values if name not in self.names]
        if len(unused) == len(inputs.values):
            rule = f"{self.name}.forward takes {', '.join(self.names)}, but the batch has {', '.join(inputs.values)}"
            wanted = [n for n in self.required if not (with_targets and n == self.target)] or self.names[:1]
            keys = " and ".join(map(repr, wanted))
            fix = f"return a dict with the key{'s' * (len(wanted) > 1)} {keys}, "
            named = "or name the argument `batch`"
            if len(wanted) == len(inputs.values) and all(map(str.isidentifier, inputs.values)):
                more = f", {self.target}=None" if with_targets and self.target else ""
                named = f"or def forward(self, {', '.join(inputs.values)}{more})"
            raise at_return(bad("data", "…", rule, fix + named), reader)
        if unused:
            log.info("%s.forward has no argument %s: left out", self.name, ", ".join(unused))

    def _check_parts(self, parts: tuple[Any, ...], with_targets: bool, reader: Any) -> None:
        """Reject samples of several inputs, of which each is an argument of forward, if it takes fewer."""
        most = len(self.positional) - (with_targets and self.target in self.positional)
        if self.names == ["batch"] or len(parts) <= most:
            return
        takes = f"{self.name}.forward({', '.join(self.names)}) takes {most}"
        are_numbers = all(isinstance(part, Tensor) and part.dim() == 1 for part in parts)
        more = ", targets" * with_targets
        fix = f"def forward(self, {', '.join('abcdefgh'[: len(parts)])}{more}), an argument for each of them"
        if are_numbers or len(parts) > MOST_INPUTS:
            one = "torch.stack" if isinstance(parts[0], Tensor) and parts[0].dim() > 1 else "torch.tensor"
            fix = f"one tensor in each sample, {one}(inputs)"
        rule = f"its samples have {len(parts)} inputs, and {takes}"
        raise at_return(bad("data", "…", rule, fix), reader)


def plain(targets: Any) -> Any:
    """Return targets as the data set gave them: a dict or tuple instead of Fields."""
    return targets.values if isinstance(targets, Fields) else targets


def loss_in(model: Any, outputs: Any, key: str = "model", name: str = "", function: Any = None) -> Tensor:
    """Return the loss in what a model or a loss returned; in evaluation followed by the parts that it is a sum of.

    key, name, function: the setting, and the user's function that returned it, for messages.
    """
    if isinstance(outputs, Tensor):
        return outputs
    found = outputs.get("loss") if isinstance(outputs, Mapping) else getattr(outputs, "loss", None)
    if isinstance(found, Tensor) and found.dim() == 0:
        return found
    if isinstance(outputs, Mapping) and not isinstance(found, Tensor):
        outputs = found if isinstance(found, Mapping) else outputs
        parts = {k: v for k, v in outputs.items() if isinstance(v, Tensor) and v.dim() == 0}
        if parts and len(parts) == len(outputs):
            total = torch.stack([part.float() for part in parts.values()]).sum()
            if model.training:
                return total
            model.eval_metrics = tuple(parts)
            return torch.stack([total, *(part.float() for part in parts.values())])
    if isinstance(outputs, tuple):  # (loss, logits), or (logits, loss)
        numbers = [part for part in outputs if isinstance(part, Tensor) and part.dim() == 0]
        if numbers and (len(numbers) == 1 or numbers[0] is outputs[0]):
            return numbers[0]
    if is_number(found):
        raise losses.without_gradient(key, name, f"its loss is {kind_of(found)}, which has no gradient", function)
    kind = f"a dict with {', '.join(map(str, outputs))}" if isinstance(outputs, Mapping) else kind_of(outputs)
    kind = "None: is a `return` missing?" if outputs is None else f"{kind}, without a loss"
    fix = FIX
    is_hf = outputs is not None and str(getattr(function, "__module__", "")).startswith("transformers.")
    if is_hf and "labels" in inspect.signature(function).parameters:
        kind += ", which it computes only from labels"
        fix = 'samples with a field "labels", or (inputs, targets) with loss=cross_entropy'
    raise at_return(bad(key, name, f"{'forward ' * (key == 'model')}returned {kind}", fix), function)


def is_number(value: Any) -> bool:
    """Is it a number, or an array of numpy, where a tensor is needed?"""
    return isinstance(value, (int, float)) or type(value).__module__ == "numpy"


def lacks_gradient(model: nn.Module, value: Any) -> bool:
    """In a step of the training: does a tensor depend on none of the weights, though some are trained?"""
    if not isinstance(value, Tensor) or value.requires_grad or not torch.is_grad_enabled() or not model.training:
        return False
    return any(p.requires_grad for p in model.parameters())


def without_gradient(model: nn.Module, what: str) -> ValueError:
    """Return the error of outputs, or of a model's own loss, that lack a gradient."""
    name, function = type(model).__name__, type(model).forward
    return losses.without_gradient("model", name, f"{what} of {name}.forward has no gradient", function)


def scores(outputs: Any) -> Any:
    """Return the tensor that a loss compares with targets: Hugging Face models return it as .logits."""
    found = outputs.get("logits") if isinstance(outputs, Mapping) else getattr(outputs, "logits", None)
    if isinstance(outputs, Tensor) or not isinstance(found, Tensor):
        return outputs
    return found


def shifts_labels(model: nn.Module) -> bool:
    """Return whether a Hugging Face model compares each place with the next label: labels are the inputs then."""
    function = getattr(model, "loss_function", None) if hasattr(model, "loss_type") else None
    return getattr(function, "__name__", "") == "ForCausalLMLoss"


def call_of(model: Any) -> Call:
    """Return how the model is called; kept on the model, because its forward() will be another."""
    if not isinstance(getattr(model, "batch_call", None), Call):
        model.batch_call = Call(model.forward, type(model).__name__)
    return model.batch_call


def own_loss(model: nn.Module) -> Callable[..., Any]:
    """Return a forward(inputs, targets=None) for a model that computes its loss itself."""
    name, shifts = type(model).__name__, shifts_labels(model)
    call = call_of(model)
    if call.target is None and (
        hasattr(model, "loss_type") or (not call.in_second and not call.takes_more and call.names[:1] != ["batch"])
    ):
        rule = f"{name}.forward({', '.join(call.names)}) takes no targets"
        raise bad("loss", "own", f"{rule}, so nothing computes a loss", losses.FIX)

    @functools.wraps(type(model).forward)  # others look at its signature: a cache to sample with, a pipeline's source
    def forward(self: Any, inputs: Any, targets: Any = None, **more: Any) -> Any:
        own = type(self).forward.__get__(self)
        if more:
            return own(inputs, **({} if targets is None else {call.positional[1]: targets}), **more)
        if targets is None:
            return call(own, inputs)
        if shifts and isinstance(inputs, Tensor):  # our targets are not the inputs: each is that of its own place
            return losses.cross_entropy(scores(call(own, inputs)), targets)
        returned = call(own, inputs, targets)
        if is_number(returned):
            raise losses.without_gradient(
                "model", name, f"forward returned {kind_of(returned)}, which has no gradient", type(self).forward
            )
        loss = loss_in(self, returned, "model", name, type(self).forward)
        if self.training and loss.numel() != 1:
            rule = f"forward returned {losses.described(loss)}, and with loss=own it returns the loss, one number"
            fix = "loss=cross_entropy, if these are scores; or return the mean loss"
            raise at_return(bad("model", name, rule, fix), type(self).forward)
        if not torch.compiler.is_compiling() and lacks_gradient(self, loss):
            raise without_gradient(self, "the loss")
        return loss.reshape(()) if loss.shape == (1,) else loss  # which backward() takes, too

    return forward
