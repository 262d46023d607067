"""Complete a plain module: its loss, its initial weights, and default plans that work for every model.

Everything is attached to the module itself and nothing wraps it, so parameter names stay. The attached methods are
bound: a copy of the module (a pipeline stage) has its own.
"""

from __future__ import annotations

import functools
import inspect
import logging
import random
from collections import defaultdict
from collections.abc import Callable
from types import MethodType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from dtrain.errors import bad
from dtrain.models import calling, check_model, losses
from dtrain.models.layers import eval_metrics
from dtrain.runs.source_lines import at_return
from dtrain.util.format import kind_of
from dtrain.util.meta_device import on_meta

log = logging.getLogger("dtrain")


def construct(build: Callable[[], nn.Module], seed: int, function: Any = None) -> nn.Module:
    """Build the module on the meta device; via the CPU if its constructor needs tensor values. function: that makes it,
    for messages."""
    try:
        with on_meta():
            model = build()
        check_model.check(model, function)
        kept = tensors_beside(model)
        why = f"{kept[0]} is a tensor, but neither a parameter nor a buffer" if kept else ""
    except Exception as error:
        if "\n  fix: " in str(error):
            raise
        why = f"{type(error).__name__}: {error}"
    if why:
        model = on_cpu(build, seed)  # errors that occur on every device are raised here
        check_model.check(model, function)
        log.info("the model cannot be built on the meta device, so it was built on the CPU first (%s)", why)
        to_meta(model)
    return model


def complete(model: Any, loss: Any, build: Callable[[], nn.Module], seed: int) -> None:
    """Add what a model does not define itself. `build` builds it again, with values."""
    model._own_names = own_names(model)  # own_names may be a method of the user
    for module in model.modules():
        module._non_persistent_buffers_set.clear()  # a checkpoint has every buffer, and loading needs all of them
        if type(module) in NORMS:
            module.forward = MethodType(norm, module)
    if getattr(getattr(model, "config", None), "use_cache", None) is True and hasattr(model, "loss_type"):
        model.config.use_cache = False  # of a Hugging Face model: keys and values of earlier tokens
    function = losses.ready(loss)
    if function is not None:
        attach_loss(model, function)
    elif not type(model).__module__.startswith("dtrain."):
        model.forward = MethodType(calling.own_loss(model), model)
    # a user's or a library's method of the same name with another signature is not the plan
    if not takes(getattr(model, "init_weights", None), 3):
        model.init_weights = FromConstructor(build, seed)
    if not takes(getattr(model, "fsdp_units", None), 0):
        model.fsdp_units = MethodType(repeated_blocks, model)
    if not isinstance(getattr(model, "num_parameters", None), int):
        model.num_parameters = sum(p.numel() for p in model.parameters())
    if not takes(getattr(model, "flops_per_sample", None), 0):
        model.flops_per_sample = MethodType(six_per_parameter, model)


def own_names(model: nn.Module) -> dict[str, Any]:
    """Return how the names of the model's own state_dict() differ from a checkpoint's: for an export.

    tied: other names of a tensor, with the one under which a checkpoint has it. transient: buffers that state_dict()
    leaves out, but a checkpoint has.
    """
    first: dict[Any, str] = {}
    tied, transient = {}, []
    for prefix, module in model.named_modules(remove_duplicate=False):
        tensors: list[tuple[str, Any]] = [(name, id(p)) for name, p in module._parameters.items() if p is not None]
        tensors += [(name, (id(module), name)) for name, b in module._buffers.items() if b is not None]
        for local, key in tensors:
            name = f"{prefix}.{local}" if prefix else local
            if local in module._non_persistent_buffers_set:
                transient.append(name)
            elif first.setdefault(key, name) != name:
                tied[name] = first[key]
    return ({"tied": tied} if tied else {}) | ({"transient": transient} if transient else {})


def buffers_of(model: nn.Module) -> dict[str, Tensor]:
    """Return the buffers by the names that a checkpoint has: of a tensor in two modules, both, as the two may become
    different ones; of a module in two places, the first."""
    places = ((prefix, name, b) for prefix, module in model.named_modules() for name, b in module._buffers.items())
    return {f"{prefix}.{name}" if prefix else name: b for prefix, name, b in places if b is not None}


def takes(method: Any, count: int) -> bool:
    """Return whether it can be called with this many arguments."""
    if not callable(method):
        return False
    try:
        inspect.signature(method).bind(*range(count))
    except TypeError:
        return False
    except ValueError:  # no signature available: the call itself will show
        return True
    return True


# ---- the loss ------------------------------------------------------------------------------------------------


def attach_loss(model: Any, loss: Callable[..., Tensor]) -> None:
    """Make it model(inputs, targets=None): return outputs, or their loss, in evaluation with metrics if it has any."""
    if isinstance(loss, nn.Module) and any(True for _ in loss.parameters()):
        rule = "has weights, and only the model's are trained and saved"
        raise bad("loss", type(loss).__name__, rule, "make it a part of the model, and let the model return its loss")
    function = getattr(loss, "func", loss)
    own = getattr(function, "forward", function)  # for messages
    name = str(getattr(function, "__name__", type(function).__name__))
    knows_mode = "training" in inspect.signature(function).parameters
    metrics = eval_metrics(function)
    call = calling.call_of(model)
    is_known = (getattr(function, "__module__", None) or "").partition(".")[0] in ("dtrain", "torch")
    has_pairs = is_known and losses.NUMBERS.fullmatch(name) is not None

    def forward(self: nn.Module, inputs: Any, targets: Any = None, **more: Any) -> Any:  # more: the cache under cp
        outputs = call(functools.partial(type(self).forward.__get__(self), **more), inputs)
        if targets is None:
            return outputs
        if is_known:  # a loss of the user gets all that the model returns
            if outputs is None:
                raise at_return(losses.no_tensor(name, outputs), type(self).forward)
            outputs = calling.scores(outputs)
        targets = calling.plain(targets)
        if isinstance(loss, nn.Module):
            loss.to(next(self.parameters()).device)  # for example class weights
        watch: Any = self.watch
        if watch is not None:  # a hook's train_metrics
            watch(outputs, targets)
        mode = {"training": self.training} if knows_mode else {}
        if has_pairs:  # also under compile, where it costs nothing in a step
            losses.check_pairs(name, outputs, targets)
        if torch.compiler.is_compiling():
            value = loss(outputs, targets, **mode)
        else:
            if is_known:
                value = losses.call(loss, name, outputs, targets, **mode)
            else:
                value = losses.call_own(loss, name, outputs, targets, type(self).forward, **mode)
            if calling.is_number(value):
                raise losses.without_gradient("loss", name, f"returned {kind_of(value)}, which has no gradient", own)
            if calling.lacks_gradient(self, value):
                if calling.lacks_gradient(self, outputs):
                    raise calling.without_gradient(self, "the output")
                raise losses.without_gradient("loss", name, "what it returns has no gradient", own)
        if not isinstance(value, Tensor):
            return calling.loss_in(self, value, "loss", name, own)
        if value.shape != ((1 + len(metrics),) if metrics and not self.training else ()):
            rule = f"returned a tensor of shape {list(value.shape)}, not a scalar"
            raise at_return(bad("loss", name, rule, "return the mean over the targets"), own)
        return value

    model.forward, model.watch = MethodType(forward, model), None
    if function is not losses.cross_entropy:
        model.perplexity = False  # only exp of the model's own loss or of cross-entropy is a perplexity
    if metrics or eval_metrics(model):
        model.eval_metrics = metrics


# ---- 16 bits -------------------------------------------------------------------------------------------------

# torch's own classes only: a subclass may do something else
NORMS = (
    nn.LayerNorm, nn.RMSNorm, nn.GroupNorm, nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d,
    nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d,
)  # fmt: skip


def norm(self: nn.Module, x: Tensor) -> Tensor:
    """A norm's forward pass; in fp32 if fsdp or zero hold its weights in 16 bits: torch refuses to mix dtypes."""
    weight = self.weight
    if isinstance(weight, Tensor) and weight.dtype != torch.float32:
        return type(self).forward(Wide(self), x.float())
    return type(self).forward(self, x)


class Wide:
    """A module as its forward pass sees it, with its weights in fp32."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module

    def __getattr__(self, name: str) -> Any:
        value = getattr(self.module, name)
        return value.float() if isinstance(value, nn.Parameter) else value


# ---- initial weights -----------------------------------------------------------------------------------------


class FromConstructor:
    """init_weights for a module without one: the values that its constructor produces under the run's seed.

    So all ranks and strategies start alike. Each rank builds the full module in host memory when the first value is
    requested, and frees each tensor once it is taken.
    """

    def __init__(self, build: Callable[[], nn.Module], seed: int) -> None:
        self.build, self.seed = build, seed
        self.values: dict[str, Tensor] = {}

    def __call__(self, name: str, weight: Tensor, generator: torch.Generator) -> None:
        if name not in self.values:
            model = on_cpu(self.build, self.seed)
            self.values = {n: t.detach() for n, t in (dict(model.named_parameters()) | buffers_of(model)).items()}
        weight.copy_(self.values.pop(name))

    def __deepcopy__(self, memo: Any) -> FromConstructor:
        return self  # a pipeline stage takes its own part of the same values


def on_cpu(build: Callable[[], nn.Module], seed: int) -> nn.Module:
    """Build the module with its constructor's values, the same in every process."""
    drawn = random.getstate(), np.random.get_state()
    try:
        with torch.random.fork_rng(devices=[]), torch.device("cpu"):
            torch.default_generator.manual_seed(seed)
            random.seed(seed)
            np.random.seed(seed % 2**32)
            return build()
    finally:
        random.setstate(drawn[0])
        np.random.set_state(drawn[1])


def tensors_beside(model: nn.Module) -> list[str]:
    """Return tensors kept as plain attributes: on the meta device they have no values, and nothing can restore them."""
    found = []
    for prefix, module in model.named_modules():
        for name, value in vars(module).items():
            if name not in ("_parameters", "_buffers", "_modules"):
                items = list(value.values()) if isinstance(value, dict) else value
                items = items if isinstance(items, (list, tuple)) else [items]
                if any(isinstance(item, Tensor) and item.is_meta for item in items):
                    found.append(f"{prefix}.{name}" if prefix else name)
    return found


def to_meta(model: nn.Module) -> None:
    """Free the memory. A weight under two names stays one, as strategies/materialize.py needs it."""

    @functools.cache
    def parameter(p: nn.Parameter) -> nn.Parameter:
        return nn.Parameter(p.detach().to("meta"), p.requires_grad)

    for module in model.modules():
        for name, p in module._parameters.items():
            module._parameters[name] = None if p is None else parameter(p)
        for name, b in module._buffers.items():
            module._buffers[name] = None if b is None else b.to("meta")


# ---- plans ---------------------------------------------------------------------------------------------------


def repeated_blocks(model: nn.Module) -> list[nn.Module]:
    """Return the layers: among modules repeated in a list, dict or sequential, the type with the most parameters.

    Return the whole model if there is no such type.
    """
    kinds: dict[type, list[nn.Module]] = defaultdict(list)
    for container in model.modules():
        if isinstance(container, (nn.ModuleList, nn.ModuleDict, nn.Sequential)):
            children = list(container.children())
            for kind in dict.fromkeys(map(type, children)):
                if issubclass(kind, (nn.ModuleList, nn.ModuleDict)):
                    continue  # these are never called
                same = [child for child in children if type(child) is kind]
                if len(same) > 1:
                    kinds[kind] += same
    sizes = {kind: num_parameters(outermost(blocks)) for kind, blocks in kinds.items()}
    best = max(sizes, key=sizes.__getitem__, default=None)  # the first of equals: the outer one
    return outermost(kinds[best]) if best and sizes[best] else [model]


def outermost(modules: list[nn.Module]) -> list[nn.Module]:
    """Return each module once, without those inside another one."""
    unique = list(dict.fromkeys(modules))
    inside = {id(part) for module in unique for part in module.modules() if part is not module}
    return [module for module in unique if id(module) not in inside]


def num_parameters(modules: list[nn.Module]) -> int:
    return sum({p: p.numel() for module in modules for p in module.parameters()}.values())


def six_per_parameter(model: nn.Module) -> float:
    """FLOPs, forward and backward, of one sample that uses every weight once: 2 and 4 per parameter."""
    return 6.0 * int(model.num_parameters)  # type: ignore[arg-type]
