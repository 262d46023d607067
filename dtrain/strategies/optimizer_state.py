"""The optimizer's state: create it before the first step, and merge what the ranks know of it."""

from __future__ import annotations

import copy
from collections import defaultdict
from typing import Any

import torch
from torch import Tensor

from dtrain.kernels import SCALES
from dtrain.optim.adafactor import FACTORS, Adafactor
from dtrain.optim.adamw import AdamW
from dtrain.optim.muon import Muon
from dtrain.util.collective import distinct


def merged(counts: dict[str, dict[str, float]]) -> dict[str, dict[str, float]]:
    """Merge what all ranks know of each weight."""
    everything: dict[str, dict[str, float]] = {}
    for part in distinct(counts):
        for name, slots in part.items():
            everything.setdefault(name, {}).update(slots)
    return everything


def is_tensor(key: str, value: Any, p: Tensor) -> bool:
    """Return whether an entry of a weight's state is saved as a tensor; all others are numbers."""
    return isinstance(value, Tensor) and (value.shape == p.shape or key in FACTORS or key in SCALES.values())


class Slots(dict[str, Any]):
    """The state of a parameter, which notes the first value of each entry that is not zero."""

    def __init__(self) -> None:
        self.first: dict[str, Any] = {}

    def __setitem__(self, key: str, value: Any) -> None:
        if key not in self and not (isinstance(value, Tensor) and not value.any()):
            self.first[key] = copy.deepcopy(value)
        super().__setitem__(key, value)


def reset(slots: dict[str, Any]) -> dict[str, Any]:
    """Return a parameter's state with its first values; where they were not noted, with zeros."""
    first = getattr(slots, "first", {})
    for key, value in slots.items():
        if not isinstance(value, Tensor):
            slots[key] = first.get(key, value)
        elif key in first:
            value.copy_(first[key])
        else:
            value.zero_()
    return dict(slots)


def init_optimizer_state(optimizer: torch.optim.Optimizer) -> None:
    """Create the optimizer's lazy state by one step that changes nothing: zero gradients, zero learning rate.

    The values that the state is created with are noted and set again afterwards: not all are zero.
    """
    if isinstance(optimizer, Muon):
        optimizer.create_momenta()
    if isinstance(optimizer, Adafactor):
        optimizer.create_state()
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
    kept = optimizer.state  # others may hold the same object
    optimizer.state = defaultdict(Slots, kept)
    optimizer.step()
    for p, gradient in zip(parameters, gradients, strict=True):
        p.grad = gradient
    for group, rate in zip(optimizer.param_groups, rates, strict=True):
        group["lr"] = rate
    kept |= {p: reset(optimizer.state[p]) for p in missing}  # without what that step counted
    optimizer.state = kept
    if isinstance(optimizer, AdamW):
        optimizer.forget_sums()
