"""Check what a model class of the user has made: an nn.Module that knows all of its weights, and their shapes."""

from __future__ import annotations

import ast
import difflib
import inspect
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from dtrain.config.files import TARGET, default_options
from dtrain.config.source import inherited
from dtrain.config.source_files import spec_of
from dtrain.config.source_hints import likely
from dtrain.errors import bad
from dtrain.runs.source_lines import at_attribute, at_class, at_def, at_return, returned, source
from dtrain.util.format import short_path


def check(model: Any, function: Any = None) -> None:
    """Reject what is no module, lazy weights, and weights that PyTorch does not see as they are in a plain list.

    function: of the user, which made it.
    """
    if not isinstance(model, nn.Module):
        fix = "a class with `class Net(nn.Module)`, or a function that returns an object of one"
        if isinstance(model, type):
            name = model.__name__
            fix = f"`return {name}()`, or model={model.__module__}.{name}"
            raise at_return(bad("model", name, f"it returned the class {name}", fix), function)
        rule = "what it gives is not a torch.nn.Module"
        raise at_return(bad("model", type(model).__name__, rule, fix), function)
    if isinstance(model, (nn.parallel.DistributedDataParallel, nn.DataParallel)):
        kind = type(model).__name__
        rule = f"is wrapped in {kind}, and strategy= does what that is for"
        raise at_return(bad("model", kind, rule, f"return the model itself, without {kind}(…)"), function)
    made = type(model)
    if made.__name__ == "OptimizedModule" and made.__module__.startswith("torch._dynamo"):  # slow to import
        rule = "is compiled already, and compile= does that, also under a strategy"
        raise at_return(bad("model", "torch.compile(…)", rule, "return the model itself; compile=auto"), function)
    for name, weight in model.named_parameters():
        if isinstance(weight, nn.parameter.UninitializedParameter):
            rule = f"{name} is lazy: it has no shape before forward() runs, and dtrain must know what to divide"
            fix = "a module with all its sizes: nn.Linear(in_features, out_features), not nn.LazyLinear"
            raise at_attribute(bad("model", type(model).__name__, rule, fix), model, name.rpartition(".")[0])
    for place, wanted in not_trained(model):
        if differentiates(model):  # by points that it keeps, as in a differential equation
            break
        rule = f"{place} is a tensor with requires_grad, but no Parameter, so it is not trained"
        fix = f"self.{place.rpartition('.')[2]} = nn.{wanted}(…), or a buffer without requires_grad"
        raise at_attribute(bad("model", type(model).__name__, rule, fix), model, place)
    known = {id(module) for module in model.modules()}
    for prefix, module in model.named_modules():
        for name, value in vars(module).items():
            if name in ("_parameters", "_buffers", "_modules") or not isinstance(value, (list, tuple, dict)):
                continue
            for item in inside(value):
                hidden = isinstance(item, nn.Parameter) or (
                    isinstance(item, nn.Module) and id(item) not in known and any(True for _ in item.parameters())
                )
                if hidden and not (isinstance(item, nn.Parameter) and any(item is p for p in model.parameters())):
                    place = f"{prefix}.{name}" if prefix else name
                    kind = "Module" if isinstance(item, nn.Module) else "Parameter"
                    by_name = isinstance(value, dict) and all(isinstance(key, str) for key in value)
                    wanted = f"nn.{kind}{'Dict' if by_name else 'List'}(…)"
                    if isinstance(value, dict) and not by_name:
                        wanted += f", or nn.{kind}Dict(…) with text as keys"
                    rule = f"{place} is a plain {type(value).__name__} of {kind.lower()}s, which are not trained"
                    fix = f"self.{name} = {wanted}"
                    if isinstance(value, tuple) and len(value) == 1 and isinstance(item, nn.Module):
                        rule = f"{place} is a tuple of one {type(item).__name__}, which is not trained"
                        fix = f"self.{name} = nn.{type(item).__name__}(…), without the comma after it"
                    raise at_attribute(bad("model", type(model).__name__, rule, fix), model, place)


def not_trained(model: nn.Module) -> Iterator[tuple[str, str]]:
    """Yield the names of tensors that want a gradient, but which no optimizer sees, and what each should be."""
    for prefix, module in model.named_modules():
        held = {k: v for k, v in vars(module).items() if k not in ("_parameters", "_buffers", "_modules")}
        for name, value in (held | module._buffers).items():
            items = inside(value) if isinstance(value, (list, tuple, dict)) else (value,)
            for item in items:
                wants = isinstance(item, Tensor) and not isinstance(item, nn.Parameter) and item.requires_grad
                # a dummy is an input that lets torch.utils.checkpoint compute a gradient (use_reentrant=True)
                if wants and item.is_leaf and "dummy" not in name.lower():
                    kinds: dict[type, str] = {list: "ParameterList", tuple: "ParameterList", dict: "ParameterDict"}
                    yield f"{prefix}.{name}" if prefix else name, kinds.get(type(value), "Parameter")
                    break


def differentiates(model: nn.Module) -> bool:
    """Does code of the user compute gradients itself, as by torch.autograd.grad?"""
    kinds = {kind for module in model.modules() for kind in type(module).__mro__}
    nodes = (node for kind in kinds if (found := source(kind)) for node in ast.walk(found[1]))
    return any(getattr(node, "attr", getattr(node, "id", "")) in ("grad", "autograd") for node in nodes)


def check_trains(model: nn.Module) -> None:
    """Reject a model without anything to train."""
    if any(p.requires_grad for p in model.parameters()):
        return
    name = type(model).__name__
    frozen = [weight for weight, _ in model.named_parameters()]
    rule = "has no parameters, so there is nothing to train"
    fix = f"layers as attributes: self.layer = nn.Linear(…) in {name}.__init__"
    shared = [part for part, value in vars(type(model)).items() if isinstance(value, nn.Module)]
    if shared:
        rule = f"has no parameters: {', '.join(shared)} belong to the class, and PyTorch sees those of an object"
        fix = f"self.{shared[0]} = … in {name}.__init__, after super().__init__()"
    if frozen:
        rule = f"has no parameter to train: all {len(frozen)} have requires_grad=False"
        fix = f"leave out requires_grad_(False) for some of them, for example {frozen[-1]}"
    elif "__init__" not in vars(type(model)) and (near := near_init(type(model))):
        rule += f", and Python does not call {near.__name__}"
        fix = f"def __init__ in place of def {near.__name__}, with two _ on each side, and super().__init__() in it"
        raise at_def(bad("model", name, rule, fix), near)
    raise at_class(bad("model", name, rule, fix), type(model))


def near_init(kind: type) -> Any:
    """Return a method of the user's class whose name is __init__ misspelt: _init_, __int__, init."""
    methods = {name.strip("_"): method for name, method in vars(kind).items() if inspect.isfunction(method)}
    near = difflib.get_close_matches("init", methods, 1, 0.8) or [name for name in methods if name == "inti"]
    return methods[near[0]] if near else None


def check_reads(model: Any, inputs: Any, targets: Any, choices: Mapping[str, Any]) -> None:
    """Reject a batch of the user's data that a model of dtrain cannot read, as tokens or images."""
    name, gives = str(choices.get("model")), f"data={choices.get('data')} gives "
    shape = f"inputs {list(inputs.shape)} of {inputs.dtype}" if isinstance(inputs, Tensor) else "several inputs"
    tokens = getattr(model, "vocab_size", None)
    is_pair = (
        isinstance(inputs, Tensor) and inputs.dim() == 3 and inputs.shape[-1] == 2
    )  # position or segment beside it
    words = inputs[..., 0] if is_pair else inputs
    if not isinstance(inputs, Tensor):
        wanted = "one tensor"
    elif tokens and (inputs.dtype not in (torch.int64, torch.int32) or words.dim() != 2):
        wanted = "tokens, whole numbers of shape [batch, places]"
    elif tokens and getattr(model, "positions", None) is not None and inputs.shape[1] > model.seq_len:
        rule = f"reads at most {model.seq_len} tokens, and {gives}{shape}"
        raise bad("model.seq_len", model.seq_len, rule, f"model.seq_len={inputs.shape[1]}")
    elif tokens and words.numel() and not 0 <= int(words.min()) <= int(words.max()) < tokens:
        low, high = int(words.min()), int(words.max())
        rule = f"reads tokens from 0 to {tokens - 1}, and {gives}{high if low >= 0 else low}"
        fix = f"model.vocab_size={high + 1}, or more" if low >= 0 else "tokens from 0"
        raise bad("model.vocab_size", tokens, rule, fix)
    elif not tokens and (inputs.dim() != 4 or not inputs.is_floating_point()):
        wanted = "images, floating point of shape [batch, channels, height, width]"
    else:
        return
    is_default = name == default_options()["model"]
    rule = f"reads {wanted}, and {gives}{shape}" + (" (the default, if no model is named)" if is_default else "")
    module = str(choices.get("data")).rpartition(".")[0]
    spec = spec_of(module)
    own = likely("model", Path(spec.origin)) if spec and spec.origin and spec.origin.endswith(".py") else []
    first = f"model={module}.{own[0]}{needed_loss(f'{module}.{own[0]}', targets, choices)}" if own else ""
    first = first or "name yours, model=MODULE.NAME"
    raise bad("model", name, rule, f"{first}; or data that it reads (docs/models.md)")


def needed_loss(model: str, targets: Any, choices: Mapping[str, Any]) -> str:
    """Return the loss to type beside a model that takes only inputs."""
    forward = inherited(model, "forward")
    takes_one = isinstance(forward, ast.FunctionDef) and len(forward.args.args) == 2 and not forward.args.vararg
    if choices.get("loss") != "own" or not takes_one or not isinstance(targets, Tensor) or not targets.numel():
        return ""
    return " loss=mse" if targets.is_floating_point() else " loss=cross_entropy"


def inside(value: Any, around: tuple[int, ...] = ()) -> Iterator[Any]:
    """Yield what is in lists, tuples and dicts, also if one contains itself. around: those that contain it."""
    around = (*around, id(value))
    for item in value.values() if isinstance(value, dict) else value:
        if not isinstance(item, (list, tuple, dict)):
            yield item
        elif id(item) not in around:
            yield from inside(item, around)


# what a model must not end in under a loss
SQUASHES = {
    "nll_loss": "linear", "NLLLoss": "linear",
    "cross_entropy": "softmax", "CrossEntropyLoss": "softmax", "BCEWithLogitsLoss": "sigmoid",
    "binary_cross_entropy_with_logits": "sigmoid",
}  # fmt: skip


def of_squashed(model: nn.Module, loss: str) -> Iterator[str]:
    """Warn of a model that ends in a softmax which its loss computes, too, or without the one that it needs.

    Nothing fails then: the model learns slowly, or the loss falls without an end.
    """
    short = loss.rpartition(".")[2]
    if not loss.startswith(("dtrain.", "torch.")) or short not in SQUASHES:
        return
    found, end = returned(type(model).forward), last_of(model)
    if type(model).forward is not nn.Sequential.forward:
        end = ""
    if found and isinstance(found[1], ast.Call) and isinstance(called := found[1].func, ast.Attribute):
        of_self = ast.unparse(called.value) == "self"
        end = last_of(getattr(model, called.attr, None)) if of_self else called.attr
    if end != SQUASHES[short]:
        return
    where = f"{short_path(Path(found[0]))}:{found[1].lineno}: " if found else ""
    if end == "linear":
        rule = f"the model ends in scores, and loss={short} needs their logarithms of probabilities"
        yield f"{where}{rule}; fix: loss=cross_entropy, which computes them"
    else:
        rule = f"the model ends in a {end}, and loss={short} computes it itself, so the model learns slowly"
        yield f"{where}{rule}; fix: return the scores without the {end}"


def of_sum(function: Any, loss: Mapping[str, Any]) -> Iterator[str]:
    """Warn of a loss that is a sum over its targets: it would depend on the number of ranks. loss: its section."""
    name = str(loss[TARGET])
    found = returned(getattr(function, "forward", function))
    is_sum = loss.get("reduction") == "sum"
    if found and isinstance(found[1], ast.Call):
        is_sum |= any(ast.unparse(word) == "reduction='sum'" for word in found[1].keywords)
    if is_sum:
        where = f"{short_path(Path(found[0]))}:{found[1].lineno}: " if found else ""
        rule = f"loss={name.rpartition('.')[2]} is a sum, and depends on the batch of a rank, and so on their number"
        yield f"{where}{rule}; fix: the mean over the targets"


def last_of(module: Any) -> str:
    """Return the name of the function at the end of a module; "" if it is none of those."""
    if getattr(module, "_forward_hooks", None):
        return ""
    if type(module) is nn.Sequential and len(module):
        return last_of(module[-1])
    return {nn.Softmax: "softmax", nn.Sigmoid: "sigmoid", nn.Linear: "linear"}.get(type(module), "")
