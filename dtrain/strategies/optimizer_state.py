"""The optimizer's state: create it before the first step, and merge what the ranks know of it."""

from __future__ import annotations

import torch
from torch import Tensor

from dtrain.optim.build import AdamW
from dtrain.util.collective import distinct


def merged(counts: dict[str, dict[str, float]]) -> dict[str, dict[str, float]]:
    """Merge what all ranks know of each weight."""
    everything: dict[str, dict[str, float]] = {}
    for part in distinct(counts):
        for name, slots in part.items():
            everything.setdefault(name, {}).update(slots)
    return everything


def init_optimizer_state(optimizer: torch.optim.Optimizer) -> None:
    """Create the optimizer's lazy state by one step that changes nothing: zero gradients, zero learning rate."""
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    missing = {p for p in parameters if p not in optimizer.state}
    if not missing:
        return
    rates = [group["lr"] for group in optimizer.param_groups]
    gradients = [p.grad for p in parameters]
    for group in optimizer.param_groups:
        group["lr"] = 0.0
    for p in parameters:
        p.grad = torch.zeros_like(p) if p in missing else None
    optimizer.step()
    for p, gradient in zip(parameters, gradients, strict=True):
        p.grad = gradient
    for group, rate in zip(optimizer.param_groups, rates, strict=True):
        group["lr"] = rate
    for p in missing:  # undo what that step counted
        for value in optimizer.state[p].values():
            if isinstance(value, Tensor):
                value.zero_()
    if isinstance(optimizer, AdamW):
        optimizer.forget_sums()
