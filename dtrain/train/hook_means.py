"""Means of a hook's metrics over micro-batches and data ranks, weighted like the loss: by their targets."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._pytree import tree_leaves

from dtrain.models.layers import IGNORED
from dtrain.util import collective


class Arriving:
    """Values on their way from the GPU. `read` waits for them only, not for later work."""

    def __init__(self, values: Tensor) -> None:
        self.values, self.arrived = values, torch.cuda.Event() if values.is_cuda else None
        if self.arrived is not None:
            self.values = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
            self.values.copy_(values, non_blocking=True)
            self.arrived.record()

    def read(self) -> list[Any]:
        if self.arrived is not None:
            self.arrived.synchronize()
        found: list[Any] = self.values.tolist()
        return found


class Means:
    """Sums stay on the device until they are read. Ranks with the same batch count several times, which cancels."""

    def __init__(self) -> None:
        self.totals: dict[str, Tensor] = {}  # name → weighted sum, and sum of weights
        self.arriving: Arriving | None = None

    def add(self, name: str, value: Any, targets: Tensor) -> None:
        """Add the mean over these targets."""
        weight = num_targets(targets)
        mean = torch.as_tensor(value, device=weight.device).detach().reshape(()).double()
        pair = torch.stack([torch.where(weight > 0, mean * weight, 0.0), weight])  # a mean over nothing is NaN
        self.totals[name] = self.totals[name] + pair if name in self.totals else pair

    def sums(self) -> dict[str, tuple[float, float]]:
        """This rank's (weighted sum, weight) of each metric."""
        if not self.totals:
            return {}
        pairs = torch.stack(list(self.totals.values())).tolist()
        return {name: (total, weight) for name, (total, weight) in zip(self.totals, pairs, strict=True)}

    def reduce(self) -> None:
        """Sum over all ranks; the result is read later, when it has arrived. All ranks call it."""
        if not self.totals:
            return
        pairs = torch.stack(list(self.totals.values()))
        if collective.world_size() > 1:
            dist.all_reduce(pairs)
        self.arriving = Arriving(pairs)

    def read(self) -> dict[str, float]:
        """The means over all ranks."""
        if self.arriving is None:
            return {}
        pairs = zip(self.totals, self.arriving.read(), strict=True)
        return {name: total / weight if weight else math.nan for name, (total, weight) in pairs}


def num_targets(targets: Any) -> Tensor:
    """How many targets count, as in the mean loss; the number of samples if they are not one tensor, or empty."""
    first = next(iter(tree_leaves(targets)))
    if first is not targets or not targets.numel():
        return torch.tensor(float(len(first)), dtype=torch.float64, device=first.device)
    counts = targets != IGNORED if not targets.is_floating_point() else torch.ones_like(targets)
    return counts.sum().double()
