"""The optimizer's state: create it before the first step, and merge what the ranks know of it."""

from __future__ import annotations

import copy
from typing import Any

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


class FirstValues(dict[str, Any]):
    """The state of a parameter, which notes the first value of each entry."""

    def __init__(self) -> None:
        self.first: dict[str, Any] = {}

    def __setitem__(self, key: str, value: Any) -> None:
        if key not in self:
            is_zero = isinstance(value, Tensor) and not value.any()
            self.first[key] = None if is_zero else copy.deepcopy(value)  # a copy of zeros would cost memory
        super().__setitem__(key, value)

    def first_value(self, key: str) -> Any:
        """Return the entry with its first value; a tensor is the optimizer's own."""
        value, first = self[key], self.first[key]
        if not isinstance(value, Tensor):
            return first
        return value.zero_() if first is None else value.copy_(first)


def init_optimizer_state(optimizer: torch.optim.Optimizer) -> None:
    """Create the optimizer's lazy state by one step that changes nothing: zero gradients, zero learning rate.

    The values that the state is created with are noted and set again afterwards: not all are zero.
    """
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
    for p in missing:
        optimizer.state[p] = FirstValues()
    optimizer.step()
    for p, gradient in zip(parameters, gradients, strict=True):
        p.grad = gradient
    for group, rate in zip(optimizer.param_groups, rates, strict=True):
        group["lr"] = rate
    for p in missing:  # undo what that step counted
        slots = optimizer.state[p]
        optimizer.state[p] = {key: slots.first_value(key) for key in slots}
    if isinstance(optimizer, AdamW):
        optimizer.forget_sums()
