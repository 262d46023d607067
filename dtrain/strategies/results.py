"""What a step returns: its metrics, in host memory or still on the GPU."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass
class StepResult:
    loss: float  # mean over the global batch
    grad_norm: float  # over the whole model, before clipping
    updated: bool  # False: loss or gradient was not finite, or a spike; weights and optimizer are unchanged
    overflow: bool = False  # skipped only because the fp16 loss scale was too large; the scale is smaller now
    spiked: bool = False  # loss and gradient are finite, but one exceeds its limit; the same on all ranks
    late = False

    def read(self) -> StepResult:
        return self


class LateResult:
    """A step's metrics, still on the GPU. `read` waits for this step only, not for later ones."""

    late = True

    def __init__(self, metrics: Tensor) -> None:
        self.metrics = torch.empty(metrics.shape, dtype=metrics.dtype, pin_memory=True)
        self.metrics.copy_(metrics, non_blocking=True)
        self.arrived = torch.cuda.Event()
        self.arrived.record()

    def read(self) -> StepResult:
        self.arrived.synchronize()
        loss, norm, updated, spiked = self.metrics.tolist()
        return StepResult(loss, norm, updated=bool(updated), spiked=bool(spiked))
