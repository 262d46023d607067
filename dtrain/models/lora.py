"""LoRA (Hu et al., 2021): the weights stay frozen; two thin matrices beside chosen linear layers are trained.

A layer keeps its names: `X.lora_a` and `X.lora_b` are added beside `X.weight`, and nothing else changes. So every plan
of the model (what is gathered, how it is sharded) also holds for the model with adapters.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from dtrain.errors import bad


class LoRALinear(nn.Linear):
    """y = W x + alpha / rank · B A x, where only A and B are trained. `attach` makes it from an nn.Linear."""

    lora_a: nn.Parameter
    lora_b: nn.Parameter
    scale: float

    def forward(self, x: Tensor) -> Tensor:
        x = once_cast(x)
        y = F.linear(x, self.weight, self.bias)
        inner = F.linear(x, self.lora_a) * self.scale
        # one kernel that adds its matmul to y, instead of two more passes over y
        return torch.addmm(y.view(-1, self.out_features), inner.view(-1, inner.shape[-1]), self.lora_b.t()).view_as(y)


def once_cast(x: Tensor) -> Tensor:
    """Do the cast of autocast once for both matmuls with x."""
    kind = x.device.type
    return x.to(torch.get_autocast_dtype(kind)) if torch.is_autocast_enabled(kind) else x


def apply(model: nn.Module, rank: int, alpha: float, targets: list[str]) -> None:
    """Freeze the model, and add adapters to linear layers of its blocks: those that `targets` names, or all if [].

    A target is the end of a name: `qkv`, `attention.qkv`, `layers.0.attention.qkv`.
    """
    chosen = choose(model, targets)
    model.requires_grad_(False)
    for linear in chosen.values():
        attach(linear, rank, alpha)
    if any(isinstance(module, nn.TransformerEncoderLayer) for module in model.modules()):
        torch.backends.mha.set_fastpath_enabled(False)  # in evaluation it would bypass the adapters
    for name in getattr(model, "task_head", ()):  # new for every task: frozen, it would stay random
        model.get_submodule(name).requires_grad_(True)
    model.init_weights = functools.partial(init_weights, model.init_weights)  # type: ignore[assignment, arg-type]
    if hasattr(model, "flops_per_sample"):
        # A frozen weight needs no gradient, one of its three GEMMs. Attention has no weights and still runs in full, so
        # this slightly underestimates.
        whole = model.flops_per_sample
        model.flops_per_sample = functools.partial(share_of, whole, 2 / 3)  # type: ignore[assignment, arg-type]
    model.num_trained = sum(p.numel() for p in model.parameters() if p.requires_grad)  # type: ignore[assignment]


def choose(model: nn.Module, targets: list[str]) -> dict[str, nn.Linear]:
    """Return the linear layers that get adapters, by name: plain nn.Linear layers in the model's blocks.

    A subclass has its own forward pass, and the model may use only the weight of a layer outside the blocks (a head):
    an adapter there would never run.
    """
    units: list[nn.Module] = model.fsdp_units() if hasattr(model, "fsdp_units") else [model]  # type: ignore[operator]
    inside = {id(module) for unit in units for module in unit.modules()}
    layers = {name: m for name, m in model.named_modules() if type(m) is nn.Linear and id(m) in inside}
    known = ", ".join(dict.fromkeys(name.rpartition(".")[2] for name in layers))
    if not layers:
        rule = f"{type(model).__name__} has no linear layer (nn.Linear) in its blocks"
        raise bad("lora.rank", "> 0", rule, "lora.rank=0, which trains all weights")
    for target in targets:
        if not any(ends(name, target) for name in layers):
            rule = f"no linear layer in the blocks of {type(model).__name__} has a name that ends in {target!r}"
            raise bad("lora.targets", targets, rule, f"choose from {known}; or lora.targets=[] for all of them")
    return {name: m for name, m in layers.items() if not targets or any(ends(name, target) for target in targets)}


def ends(name: str, target: str) -> bool:
    return name == target or name.endswith(f".{target}")


def attach(linear: nn.Linear, rank: int, alpha: float) -> None:
    """Convert in place, so that all references to the layer see the adapter."""
    linear.__class__ = LoRALinear
    options: dict[str, Any] = {"device": linear.weight.device, "dtype": torch.float32}
    linear.lora_a = nn.Parameter(torch.empty(rank, linear.in_features, **options))
    linear.lora_b = nn.Parameter(torch.empty(linear.out_features, rank, **options))
    linear.scale = alpha / rank  # type: ignore[assignment]


def init_weights(inner: Callable[..., None], name: str, weight: Tensor, generator: torch.Generator) -> None:
    """Draw A at random and set B to 0, so the model starts equal to the one it was made from."""
    if name.endswith(".lora_a"):
        bound = 1 / math.sqrt(weight.shape[1])  # like torch's init of a linear layer's weight
        weight.uniform_(-bound, bound, generator=generator)
    elif name.endswith(".lora_b"):
        weight.zero_()
    else:
        inner(name, weight, generator)


def share_of(total: Callable[[], float], share: float) -> float:
    return total() * share


# ---- the base: every weight that adapters leave unchanged ----------------------------------------------------


def is_adapter(name: str) -> bool:
    return name.endswith((".lora_a", ".lora_b"))


def base_of(model: nn.Module) -> dict[str, tuple[int, ...]]:
    """Return names and shapes of the weights that are frozen for adapters; none if there are no adapters.

    This excludes models that a user froze in part: their weights may still change in other ways.
    """
    if not any(isinstance(module, LoRALinear) for module in model.modules()):
        return {}
    return {name: tuple(p.shape) for name, p in model.named_parameters() if not p.requires_grad}


def hold(model: nn.Module, dtype: torch.dtype) -> None:
    """Store the base's linear weights in the matmul dtype, while the model is on the meta device.

    Autocast would round them at every use: the same math in half the memory. Embeddings and norms stay fp32.
    """
    if not base_of(model):
        return
    for module in model.modules():
        if type(module) in (nn.Linear, LoRALinear):
            for p in (module.weight, module.bias):
                if p is not None and not p.requires_grad:
                    p.data = p.data.to(dtype)


def merged(
    weights: Iterator[tuple[str, Tensor]], adapters: Mapping[str, Tensor], scale: float
) -> Iterator[tuple[str, Tensor]]:
    """Yield the weights of an equivalent model without adapters: W + alpha / rank · B A, one at a time.

    In fp32, or in the base's own dtype if that is wider.
    """
    for name, weight in weights:
        layer = name.removesuffix(".weight")
        if name != layer and f"{layer}.lora_a" in adapters:
            a, b = adapters[f"{layer}.lora_a"], adapters[f"{layer}.lora_b"]
            product = b.to(weight.device).double() @ a.to(weight.device).double()
            weight = (weight.double() + scale * product).to(torch.promote_types(weight.dtype, torch.float32))
        yield name, weight
