"""Muon (Jordan et al., 2024): momentum of hidden matrices, orthogonalized; AdamW for all other weights.

The update needs the whole matrix. Where ranks share the work, or hold parts of a matrix, each matrix has one
owner, which gets its parts, orthogonalizes, and returns the parts of the update (optim/owners.py). The momentum stays
where the weight is, and is sharded like it.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Literal

import torch
from torch import Tensor, nn

from dtrain.errors import bad
from dtrain.optim.adamw import AdamW, has_kernel
from dtrain.optim.newton_schulz import orthogonalize_all
from dtrain.optim.owners import Owners, Piece
from dtrain.util import collective
from dtrain.util.dtensor import chunks_of, local

AdjustLR = Literal["match_rms_adamw", "original", "none"]


class Muon(torch.optim.Optimizer):
    """Groups with `matrices=True` are orthogonalized, the others are AdamW's. On one rank it is torch.optim.Muon.

    Without `share`, each rank computes for itself, on whole matrices.
    """

    compiled = False  # whether torch compiles the elementwise parts
    pieces: Mapping[Tensor, list[Piece]] | None = None
    device = torch.device("cpu")

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.95),
        eps: float = 1e-8,
        weight_decay: float = 0.1,
        momentum: float = 0.95,
        nesterov: bool = True,
        ns_steps: int = 5,
        ns_dtype: Literal["auto", "bfloat16", "float32"] = "auto",
        adjust_lr: AdjustLR = "match_rms_adamw",
        fused: bool | None = None,
    ) -> None:
        settings = {"momentum": momentum, "nesterov": nesterov, "ns_steps": ns_steps, "ns_dtype": ns_dtype}
        defaults = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay, "matrices": False}
        super().__init__(params, defaults | settings | {"adjust_lr": adjust_lr})
        # it has the same group objects, and so sees every change of a rate
        others = [group for group in self.param_groups if not group["matrices"]]
        self.adamw = AdamW(others or [{"params": []}], lr=lr, betas=betas, eps=eps, weight_decay=0.0, fused=fused)
        self.owners: dict[tuple[int, ...], Owners] = {}

    @property
    def seed(self) -> int:
        return self.adamw.seed

    @seed.setter
    def seed(self, seed: int) -> None:
        self.adamw.seed = seed

    def share(self, pieces: Mapping[Tensor, list[Piece]], device: torch.device) -> None:
        """From now on, compute together with all other ranks. `pieces`: what each parameter holds of its matrices.

        `device`: where to compute; weights that are offloaded are elsewhere.
        """
        self.pieces, self.device, self.owners = pieces, device, {}
        without = [rank for rank, count in enumerate(collective.gather(len(self.matrices()))) if not count]
        if 0 < len(without) < collective.world_size():
            rule = f"rank {without[0]} holds none of these matrices, and all ranks compute the updates together"
            raise bad("optim.matrices", "…", rule, "optim.matrices=null, or fewer pipeline stages")

    def create_momenta(self) -> None:
        for p in self.matrices():
            if p not in self.state:
                self.state[p]["momentum_buffer"] = torch.zeros_like(p, memory_format=torch.preserve_format)

    def matrices(self) -> list[nn.Parameter]:
        return [p for group in self.param_groups if group["matrices"] for p in group["params"]]

    # ---- a step ----------------------------------------------------------------------------------------------

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        loss = None if closure is None else torch.enable_grad()(closure)()
        if others := self.others():
            self.adamw.state, self.adamw.param_groups = self.state, others
            self.adamw.step()
        self.update_matrices()
        return loss

    @torch.no_grad()
    def step_if(self, finite: Tensor, factor: Tensor | None = None) -> None:
        """Step with all gradients times `factor`, unless `finite` is false. On a GPU there is no host sync."""
        if others := self.others():
            self.adamw.state, self.adamw.param_groups = self.state, others
            self.adamw.step_if(finite, factor)
        self.update_matrices(finite, factor)

    def others(self) -> list[dict[str, Any]]:
        return [group for group in self.param_groups if not group["matrices"]]

    def update_matrices(self, finite: Tensor | None = None, factor: Tensor | None = None) -> None:
        groups = [group for group in self.param_groups if group["matrices"]]
        moved = [(p, group) for group in groups for p in group["params"] if p.grad is not None]
        if not moved:  # the same on all ranks: `share` refuses ranks without a matrix
            return
        self.create_momenta()
        dtype = torch.bfloat16 if groups[0]["ns_dtype"] == "bfloat16" else torch.float32
        values = [local(p) for p, _ in moved]
        if finite is not None and not values[0].is_cuda:
            if not finite:
                return
            finite = None
        function = compiled if self.compiled and finite is not None and has_kernel() else plain
        updates = function(new_momenta)(
            [local(p.grad) for p, _ in moved], [local(self.state[p]["momentum_buffer"]) for p, _ in moved],
            [group["momentum"] for _, group in moved], groups[0]["nesterov"], dtype, finite, factor,
        )  # fmt: skip
        compute = functools.partial(orthogonalize_all, steps=groups[0]["ns_steps"])
        if self.pieces is None:
            targets, shapes = values, [tuple(p.shape) for p, _ in moved]
            updates, chosen = compute(updates), [group for _, group in moved]
        else:
            targets, shapes, updates, chosen = self.computed_together(moved, values, updates, dtype, compute)
        on = values[0].device
        keep = [1 - group["lr"] * group["weight_decay"] for group in chosen]
        rate = [group["lr"] * lr_factor(group["adjust_lr"], shape) for group, shape in zip(chosen, shapes, strict=True)]
        if finite is None:
            apply(targets, [u.to(on) for u in updates], keep, rate)
        else:  # as a tensor: a compiled function would be compiled again for each new rate
            rates = torch.tensor([keep, rate], pin_memory=True).to(on, non_blocking=True)
            function(apply_if)(targets, [u.to(on) for u in updates], rates, finite)

    def computed_together(
        self, moved: list[tuple[nn.Parameter, dict[str, Any]]], values: list[Tensor], updates: list[Tensor],
        dtype: torch.dtype, compute: Callable[..., list[Tensor]],
    ) -> tuple[list[Tensor], list[tuple[int, ...]], list[Tensor], list[dict[str, Any]]]:  # fmt: skip
        """Return the parts of weights that this rank holds, their matrices' shapes, their updates, their groups."""
        assert self.pieces is not None
        key = tuple(id(p) for p, _ in moved)
        held = [
            (piece, piece.of(value), piece.of(update), group)
            for (p, group), value, update in zip(moved, values, updates, strict=True)
            for piece in self.pieces[p] if math.prod(piece.shape)
        ]  # fmt: skip
        if key not in self.owners:
            self.owners[key] = Owners([piece for piece, *_ in held], self.device, dtype)
        parts: dict[str, list[Tensor]] = {}
        for piece, _, update, _ in held:
            parts.setdefault(piece.name, []).append(update.to(self.device))
        found = self.owners[key].compute(parts, compute)
        return (
            [value for _, value, _, _ in held],
            [piece.whole for piece, *_ in held],
            [found[piece.name].pop(0) for piece, *_ in held],
            [group for *_, group in held],
        )


def plain(function: Callable[..., Any]) -> Callable[..., Any]:
    return function


@functools.cache
def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    return torch.compile(function)


def new_momenta(
    gradients: list[Tensor], momenta: list[Tensor], momentum: list[float], nesterov: bool, dtype: torch.dtype,
    finite: Tensor | None, factor: Tensor | None,
) -> list[Tensor]:  # fmt: skip
    """Update the momenta in place, unless `finite` is false; return what to orthogonalize."""
    results = []
    for gradient, held, weight in zip(gradients, momenta, momentum, strict=True):
        g = gradient if factor is None else gradient * factor
        if finite is None:
            held.lerp_(g, 1 - weight)
            results.append((g.lerp(held, weight) if nesterov else held).to(dtype))
        else:
            g = torch.where(finite, g, 0.0)
            held.copy_(torch.where(finite, held.lerp(g, 1 - weight), held))
            results.append((g.lerp(held, weight) if nesterov else held).to(dtype))
    return results


def apply(weights: list[Tensor], updates: list[Tensor], keep: list[float], rate: list[float]) -> None:
    for weight, update, k, r in zip(weights, updates, keep, rate, strict=True):
        weight.mul_(k).add_(update, alpha=-r)


def apply_if(weights: list[Tensor], updates: list[Tensor], rates: Tensor, finite: Tensor) -> None:
    """`rates`: for each weight the factor that decay leaves of it, and the rate of its update."""
    for i, (weight, update) in enumerate(zip(weights, updates, strict=True)):
        weight.copy_(torch.where(finite, weight * rates[0, i] - update * rates[1, i], weight))


def lr_factor(adjust: AdjustLR, shape: Iterable[int]) -> float:
    """Return the factor of a matrix's rate: an orthogonal matrix has small elements if it is large.

    match_rms_adamw: elements of 0.2 (root mean square), as AdamW's updates have, so its rates suit (Liu et al., 2025).
    """
    rows, columns = shape
    if adjust == "match_rms_adamw":
        return 0.2 * math.sqrt(max(rows, columns))
    return math.sqrt(max(1.0, rows / columns)) if adjust == "original" else 1.0


def pieces_of(named: Iterable[tuple[str, nn.Parameter]]) -> dict[Tensor, list[Piece]]:
    """Return what plain tensors and DTensors hold of their matrices."""
    found: dict[Tensor, list[Piece]] = {}
    for name, p in named:
        (chunk,) = chunks_of(p.detach())
        found[p] = [Piece(name, chunk.whole_shape, chunk.offset, chunk.shape)]
    return found
