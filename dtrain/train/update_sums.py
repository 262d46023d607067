"""Find bits that change in memory between two updates, in every step, by checksums that AdamW's kernel keeps.

The kernel knows what it writes (kernels/adamw.py), so its checksums differ from the memory if a bit flips there. The
difference stays until it is found: one comparison per interval sees all of its steps.
"""

from __future__ import annotations

import torch
from torch import nn

from dtrain.kernels import SCALES
from dtrain.optim.adamw import AdamW, Comparison, has_kernel
from dtrain.strategies.base import Strategy
from dtrain.strategies.results import LateResult

KINDS = [("model.", ""), *(("optim.", f".{key}") for pair in SCALES.items() for key in pair)]  # of a weight's tensors


class UpdateSums:
    """Compares what a rank's optimizer updates with the checksums."""

    def __init__(self, strategy: Strategy) -> None:
        assert isinstance(strategy.optimizer, AdamW)
        self.module, self.optimizer = strategy.module, strategy.optimizer
        self.optimizer.watched = True
        self.comparisons: list[Comparison] = []
        self.late: LateResult | None = None
        self.is_started = False

    def start(self) -> None:
        """Compare, on the GPU. All ranks that start also read."""
        self.is_started, self.comparisons = True, self.optimizer.compare()
        found = [comparison.differences.any() for comparison in self.comparisons]
        self.late = LateResult(torch.stack(found)) if found else None

    def read(self) -> list[str]:
        """Return the names of the weights of which a bit, or one of their optimizer state, has changed."""
        late, comparisons = self.late, self.comparisons
        self.is_started, self.late, self.comparisons = False, None, []
        if late is None:
            return []
        late.arrived.synchronize()
        names = {id(p): name for name, p in self.module.named_parameters()}
        found = zip(late.metrics.tolist(), comparisons, strict=True)
        return [f"model.{names[id(p)]}" for differs, c in found if differs for p in c.changed()]

    def covers(self) -> set[str]:
        """Return the names of what is watched, as strategies/replicas.py names it."""
        watched = {id(p) for p in self.optimizer.watched_parameters()}
        names = [name for name, p in self.module.named_parameters() if id(p) in watched]
        return {f"{of}{name}{key}" for name in names for of, key in KINDS}


def can_watch(strategy: Strategy) -> bool:
    """Is the optimizer's kernel the only one that writes weights and state? Under ZeRO it updates flat copies.

    The same on all ranks.
    """
    ours = type(strategy).__module__.startswith("dtrain.strategies.") and is_ours(strategy.module)
    kernel = strategy.device.type == "cuda" and type(strategy.optimizer) is AdamW and has_kernel()
    return ours and kernel and not hasattr(strategy, "masters")


def is_ours(module: nn.Module) -> bool:
    """Is it a model of dtrain, and not a subclass of a user's? FSDP makes a class of its own of each."""
    kinds = (kind.__module__ for kind in type(module).__mro__)
    return next(name for name in kinds if not name.startswith(("torch.", "deepspeed."))).startswith("dtrain.")
