"""Optimizers, created from named parameters, and the rule that scales the learning rate with the batch."""

from __future__ import annotations

import functools
import inspect
import logging
import re
import zlib
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Literal

import torch
from torch import Tensor, nn

from dtrain.config.build import build, locate
from dtrain.config.files import TARGET
from dtrain.errors import bad
from dtrain.optim.adafactor import Adafactor
from dtrain.optim.adamw import AdamW
from dtrain.optim.groups import Rules, grouped, hidden_matrices
from dtrain.optim.lion import Lion
from dtrain.optim.muon import Muon
from dtrain.runs.source_lines import at_def, at_return, is_users
from dtrain.util.format import kind_of

log = logging.getLogger("dtrain")
# What Python and torch raise if a function of the user takes pairs for weights, or for the model.
WITHOUT_NAMES = re.compile(
    r"'(tuple|generator|list|\w*iterator)' object (has no attribute|is not callable)|can't optimize a non-leaf|"
    r"optimizer can only optimize Tensors|argument to the optimizer should be an iterable"
)
MakeOptimizer = Callable[[Iterable[tuple[str, nn.Parameter]]], torch.optim.Optimizer]


def adamw(
    named_parameters: Iterable[tuple[str, nn.Parameter]],
    lr: float,
    betas: list[float],
    eps: float = 1e-8,
    weight_decay: float = 0.1,
    no_decay: list[str] | None = None,
    layer_decay: float = 1.0,
    lr_multipliers: list[str] | None = None,
    lr_scaling: Literal["none", "linear", "sqrt"] = "none",
    base_batch_size: int = 256,
    state: Literal["fp32", "bf16", "int8"] | None = None,
    global_batch_size: int = 256,
) -> AdamW:
    """AdamW with weight decay on matrices only; one fused kernel over all parameters on a GPU."""
    peak = scaled_lr(lr, lr_scaling, global_batch_size, base_batch_size)
    rules = Rules(no_decay, layer_decay, lr_multipliers)
    named = list(named_parameters)
    groups, fused = grouped(named, weight_decay, peak, rules)
    optimizer = AdamW(groups, lr=peak, betas=(betas[0], betas[1]), eps=eps, fused=fused)
    # a pipeline's rank knows some parameters only, and the two copies of a tied one must be rounded alike: by the name
    optimizer.moments, optimizer.numbers = state, {p: zlib.crc32(name.encode()) for name, p in named}
    return optimizer


def sgd(
    named_parameters: Iterable[tuple[str, nn.Parameter]],
    lr: float,
    momentum: float = 0.9,
    nesterov: bool = False,
    weight_decay: float = 1e-4,
    no_decay: list[str] | None = None,
    layer_decay: float = 1.0,
    lr_multipliers: list[str] | None = None,
    lr_scaling: Literal["none", "linear", "sqrt"] = "none",
    base_batch_size: int = 256,
    global_batch_size: int = 256,
) -> torch.optim.SGD:
    """SGD with momentum, common for convolutional nets; weight decay on matrices and kernels only."""
    peak = scaled_lr(lr, lr_scaling, global_batch_size, base_batch_size)
    rules = Rules(no_decay, layer_decay, lr_multipliers)
    groups, fused = grouped(named_parameters, weight_decay, peak, rules)
    return torch.optim.SGD(groups, lr=peak, momentum=momentum, nesterov=nesterov, fused=fused)


def lion(
    named_parameters: Iterable[tuple[str, nn.Parameter]],
    lr: float,
    betas: list[float],
    weight_decay: float = 1.0,
    no_decay: list[str] | None = None,
    layer_decay: float = 1.0,
    lr_multipliers: list[str] | None = None,
    lr_scaling: Literal["none", "linear", "sqrt"] = "none",
    base_batch_size: int = 256,
    global_batch_size: int = 256,
) -> Lion:
    """Lion with weight decay on matrices only."""
    peak = scaled_lr(lr, lr_scaling, global_batch_size, base_batch_size)
    rules = Rules(no_decay, layer_decay, lr_multipliers)
    groups, _ = grouped(named_parameters, weight_decay, peak, rules)
    return Lion(groups, lr=peak, betas=(betas[0], betas[1]))


def muon(
    named_parameters: Iterable[tuple[str, nn.Parameter]],
    lr: float,
    adamw_betas: list[float],
    momentum: float = 0.95,
    nesterov: bool = True,
    ns_steps: int = 5,
    ns_dtype: Literal["auto", "bfloat16", "float32"] = "auto",
    adjust_lr: Literal["match_rms_adamw", "original", "none"] = "match_rms_adamw",
    weight_decay: float = 0.1,
    matrices: list[str] | None = None,
    adamw_lr: float | None = None,
    adamw_eps: float = 1e-8,
    adamw_weight_decay: float = 0.1,
    no_decay: list[str] | None = None,
    layer_decay: float = 1.0,
    lr_multipliers: list[str] | None = None,
    lr_scaling: Literal["none", "linear", "sqrt"] = "none",
    base_batch_size: int = 256,
    global_batch_size: int = 256,
) -> Muon:
    """Muon for the matrices of numbered layers; AdamW for embeddings, the head, norms and biases."""
    peak = scaled_lr(lr, lr_scaling, global_batch_size, base_batch_size)
    rules = Rules(no_decay, layer_decay, lr_multipliers)
    adamw_peak = scaled_lr(adamw_lr or lr, lr_scaling, global_batch_size, base_batch_size)
    named = list(named_parameters)
    chosen = hidden_matrices([(name, p) for name, p in named if p.requires_grad], matrices)
    of_matrices = {id(p) for name, p in named if name in chosen}
    groups = []
    for of_muon, decay, rate in ((True, weight_decay, peak), (False, adamw_weight_decay, adamw_peak)):
        parts, fused = grouped(named, decay, rate, rules)
        for group in parts:
            members = [p for p in group["params"] if (id(p) in of_matrices) == of_muon]
            if members:
                groups.append(group | {"params": members, "matrices": of_muon, "lr": group["peak_lr"]})
    return Muon(
        groups, lr=peak, betas=(adamw_betas[0], adamw_betas[1]), eps=adamw_eps, momentum=momentum, nesterov=nesterov,
        ns_steps=ns_steps, ns_dtype=ns_dtype, adjust_lr=adjust_lr, fused=fused,
    )  # fmt: skip


def rmsprop(
    named_parameters: Iterable[tuple[str, nn.Parameter]],
    lr: float,
    alpha: float = 0.99,
    eps: float = 1e-8,
    momentum: float = 0.0,
    weight_decay: float = 0.0,
    no_decay: list[str] | None = None,
    layer_decay: float = 1.0,
    lr_multipliers: list[str] | None = None,
    lr_scaling: Literal["none", "linear", "sqrt"] = "none",
    base_batch_size: int = 256,
    global_batch_size: int = 256,
) -> torch.optim.RMSprop:
    """torch's RMSprop with weight decay on matrices only."""
    peak = scaled_lr(lr, lr_scaling, global_batch_size, base_batch_size)
    rules = Rules(no_decay, layer_decay, lr_multipliers)
    groups, _ = grouped(named_parameters, weight_decay, peak, rules)
    return torch.optim.RMSprop(groups, lr=peak, alpha=alpha, eps=eps, momentum=momentum)


def adafactor(
    named_parameters: Iterable[tuple[str, nn.Parameter]],
    lr: float,
    beta2_decay: float = -0.8,
    eps1: float | None = None,
    eps2: float = 1e-3,
    max_update: float = 1.0,
    weight_decay: float = 0.0,
    no_decay: list[str] | None = None,
    layer_decay: float = 1.0,
    lr_multipliers: list[str] | None = None,
    lr_scaling: Literal["none", "linear", "sqrt"] = "none",
    base_batch_size: int = 256,
    global_batch_size: int = 256,
) -> Adafactor:
    """torch's Adafactor with weight decay on matrices only."""
    peak = scaled_lr(lr, lr_scaling, global_batch_size, base_batch_size)
    rules = Rules(no_decay, layer_decay, lr_multipliers)
    groups, _ = grouped(named_parameters, weight_decay, peak, rules)
    return Adafactor(groups, lr=peak, beta2_decay=beta2_decay, eps=(eps1, eps2), d=max_update)


# ---- any other optimizer -------------------------------------------------------------------------------------


def factory(section: Any, trust: Iterable[str], global_batch_size: int) -> MakeOptimizer:
    """Return the function that makes the configured optimizer from named parameters.

    conf/optim has such functions. Any torch.optim.Optimizer class can be named, too; its other arguments are settings.
    """
    trust = tuple(trust)
    target, name = locate(section[TARGET], trust), section[TARGET]
    if not (isinstance(target, type) and issubclass(target, torch.optim.Optimizer)):
        takes_batch = "global_batch_size" in inspect.signature(target).parameters
        extra = {"global_batch_size": global_batch_size} if takes_batch else {}
        make = build(section, trust, partial=True, **extra)
        return make if name.startswith("dtrain.") else functools.partial(of_function, make, target, name)
    refuse_kind(target, name)
    return functools.partial(of_class, build(section, trust, partial=True))


def refuse_kind(kind: type, name: str) -> None:
    """Refuse a class of optimizers that no strategy can call, or whose state follows the schedule."""
    step = inspect.signature(kind.step).parameters  # type: ignore[attr-defined]
    if "closure" in step and step["closure"].default is inspect.Parameter.empty:
        rule = "needs a closure that computes the loss again, which no strategy gives"
        raise bad("optim", name, rule, "an optimizer whose step() needs no arguments, for example optim=adamw")
    if issubclass(kind, (torch.optim.Rprop, torch.optim.ASGD)):
        rule = "its state starts from the learning rate, which the schedule changes at every step"
        raise bad("optim", name, rule, "optim=rmsprop, or optim=sgd")


def of_function(
    make: Callable[..., Any], function: Any, name: str, named_parameters: Iterable[tuple[str, nn.Parameter]]
) -> Any:
    """Make an optimizer with the user's function; the rate of each of its groups is the peak rate."""
    example = "return torch.optim.AdamW(named_parameters, lr=1e-3)"
    short = getattr(function, "__name__", name)
    named = list(named_parameters)
    try:
        optimizer = make(iter(named))
    except (AttributeError, TypeError, ValueError) as error:  # it takes the model, or weights without names
        if "\n  fix: " in str(error) or not WITHOUT_NAMES.search(str(error)):
            raise
        rule = f"is called with pairs of a name and a weight, and failed with them: {error}"
        fix = f"def {short}(named_parameters): {example}; or `for name, weight in …` to choose weights"
        raise bad("optim", name, rule, fix) from error
    if missing := [part for part in ("param_groups", "state", "step", "zero_grad") if not hasattr(optimizer, part)]:
        if optimizer is None:
            rule = "returned None: is a `return` missing?"
        elif isinstance(optimizer, type):
            rule = f"returned the class {optimizer.__name__}"
        else:
            rule = f"gives {kind_of(optimizer)}, which has no {' and no '.join(missing)}"
        fix = "return the optimizer that it makes" if optimizer is None else f"{example}, or another optimizer of torch"
        if isinstance(function, type):
            fix = f"class {short}(torch.optim.Optimizer), or the name of one"
        raise at_return(bad("optim", name, rule, fix), function)
    refuse_kind(type(optimizer), name)
    left, taken = [], {id(p) for group in optimizer.param_groups for p in group["params"]}
    for weight, p in named:
        left += [weight] if p.requires_grad and id(p) not in taken else []
    if taken - {id(p) for _, p in named}:
        rule = "updates weights that are not those of the model: it must use the ones that it is called with"
        raise at_return(bad("optim", name, rule, f"def {short}(named_parameters): {example}"), function)
    if left:
        shown = ", ".join(left[:5]) + (f" and {len(left) - 5} more" if len(left) > 5 else "")
        fix = 'a group for the rest, {"params": rest, "lr": 0.0}, or requires_grad_(False) for them in the model'
        raise at_return(bad("optim", name, f"leaves out {shown}, which the model trains", fix), function)
    for group in optimizer.param_groups:
        group.pop("param_names", None)  # torch keeps them for its own state_dict; strategies divide the weights
        if "peak_lr" not in group and "lr" not in group:
            rule = f"the groups of {type(optimizer).__name__} have no learning rate, which the schedule sets"
            raise at_return(bad("optim", name, rule, 'a rate in each group: {"params": …, "lr": 1e-3}'), function)
        group["peak_lr"] = float(group.get("peak_lr", group["lr"]))
    return optimizer


def of_class(
    make: Callable[..., torch.optim.Optimizer], named_parameters: Iterable[tuple[str, nn.Parameter]]
) -> torch.optim.Optimizer:
    """Make an optimizer of a user's class, with its own default rate; weight decay, if it has any, of matrices only."""
    groups, _ = grouped(named_parameters, 0.0, 0.0)
    matrices = [all(p.dim() >= 2 for p in group["params"]) for group in groups]
    optimizer = make([{"params": group["params"]} for group in groups])
    for group, is_matrix in zip(optimizer.param_groups, matrices, strict=True):
        group["peak_lr"] = group["lr"]
        if "weight_decay" in group and not is_matrix:
            group["weight_decay"] = 0.0
    return optimizer


def check(make: MakeOptimizer, splits_weights: bool, names: Sequence[str] = ()) -> None:
    """Try three updates of a small matrix; refuse an optimizer that a checkpoint or this strategy cannot hold.

    `splits_weights`: ranks hold parts of matrices, so updates of two halves must be the halves of the update.
    `names`: of the weights, which a function of the user may choose by.
    """
    names = names if getattr(make, "func", None) is of_function else ()
    if names:  # without the checks of of_function: by its shape, the small matrix may be in no group
        make = make.args[0]  # type: ignore[attr-defined]
    try:
        whole, optimizer = updated(make, 1, 0, names)
    except Exception as error:
        if not names or "\n  fix: " in str(error):
            raise
        log.info("the optimizer takes certain shapes only, so it could not be tried on a small matrix (%r)", error)
        return
    name = type(optimizer).__name__
    for slots in optimizer.state.values():
        for key, value in slots.items():
            if not isinstance(value, (Tensor, int, float)) or (
                isinstance(value, Tensor) and value.numel() > 1 and value.shape != whole.shape
            ):
                rule = f"its state {key} is neither one number nor shaped like the weight, and is not saved"
                fix = "optim=adamw, adafactor, lion, rmsprop or sgd"
                if own := getattr(type(optimizer), "step", None) if is_users(type(optimizer)) else None:
                    fix = f"keep {key} out of self.state[p], or make it a tensor shaped like p or one number"
                    raise at_def(bad("optim", name, rule, fix), own)
                raise bad("optim", name, rule, fix)
    if splits_weights and not all(torch.allclose(whole, updated(make, 2, dim, names)[0], 1e-5, 1e-7) for dim in (0, 1)):
        rule = "updates whole matrices, and under this strategy a rank holds only a part of each"
        fix = "strategy=ddp or pipeline, or an optimizer that updates each element by itself"
        raise bad("optim", name, rule, fix)


def updated(
    make: MakeOptimizer, parts: int, dim: int = 0, names: Sequence[str] = ()
) -> tuple[Tensor, torch.optim.Optimizer]:
    """Return a matrix after three updates of its parts, and their optimizer. names: one optimizer for each part, whose
    weights are all that part."""
    generator = torch.Generator().manual_seed(0)
    values, *gradients = torch.randn(4, 4, 4, generator=generator)
    chunks = values.chunk(parts, dim)
    if not names:
        parameters = [nn.Parameter(chunk.clone()) for chunk in chunks]
        optimizer = stepped(make, parameters, [g.chunk(parts, dim) for g in gradients])
        return torch.cat([p.detach() for p in parameters], dim), optimizer
    firsts = []
    for i, chunk in enumerate(chunks):
        parameters = [nn.Parameter(chunk.clone()) for _ in names]
        of_part = [[g.chunk(parts, dim)[i]] * len(names) for g in gradients]
        optimizer = stepped(make, parameters, of_part, names)
        firsts.append(next(p for group in optimizer.param_groups for p in group["params"]))
    return torch.cat([p.detach() for p in firsts], dim), optimizer


def stepped(
    make: MakeOptimizer,
    parameters: list[nn.Parameter],
    gradients: Iterable[Sequence[Tensor]],
    names: Sequence[str] | None = None,
) -> torch.optim.Optimizer:
    """Return the optimizer of these weights after a step with each of the gradients."""
    optimizer = make(zip(names or map(str, range(len(parameters))), parameters, strict=True))
    settings = [{k: v for k, v in group.items() if k != "params"} for group in optimizer.param_groups]
    for of_step in gradients:
        for p, gradient in zip(parameters, of_step, strict=True):
            p.grad = gradient.clone()
        optimizer.step()
    if settings != [{k: v for k, v in group.items() if k != "params"} for group in optimizer.param_groups]:
        rule = "changes its own settings at each step, and these are not saved"
        raise bad("optim", type(optimizer).__name__, rule, "an optimizer that keeps its state per weight")
    return optimizer


def scaled_lr(lr: float, rule: str, global_batch_size: int, base_batch_size: int) -> float:
    """lr × (batch / base)^power: power 1 keeps the step per sample (Goyal et al., 2017), ½ the noise scale of Adam."""
    power = {"none": 0.0, "linear": 1.0, "sqrt": 0.5}[rule]
    return lr * (global_batch_size / base_batch_size) ** power
