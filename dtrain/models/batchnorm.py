"""Batch norm over a micro-batch of all ranks: any number of ranks gives the same result as one process.

`sync` all-reduces the statistics over all ranks, forward and backward, in one small all-reduce each. torch's own
SyncBatchNorm needs a GPU; this one runs on any device. `local` normalizes with the statistics of each rank's own
samples, as most scripts do: faster, but the computation depends on the number of ranks.

In both modes, the running statistics (buffers, for evaluation) are the same on all ranks after every forward pass.
`sync` has the same numbers everywhere anyway; a model with `local` norms calls `average_statistics` at the end of its
forward pass, one all-reduce for all layers. So a checkpoint may take them from any rank at any step.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn

from dtrain.util import late_dynamo

MOMENTUM = 0.1  # the share of the newest batch in the running statistics
EPS = 1e-5


def num_ranks() -> int:
    """Size of the default group. A model with batch norm has no tensor or pipeline plan: all ranks are data ranks."""
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


class Normalize(torch.autograd.Function):
    """Normalize over all ranks' samples; return the result and, for the running statistics, mean and unbiased variance.

    All ranks have the same number of samples: the loader ensures it.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, near: Tensor, eps: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        wide = x.float()
        var, mean = torch.var_mean(wide, dim=(0, 2, 3), correction=0)
        # Moments about `near`, a number close to the mean that all ranks share: one all-reduce, and no cancellation
        # between large squares.
        sums = torch.stack([mean - near, var + (mean - near).square()])
        dist.all_reduce(sums)
        offset, square = sums / num_ranks()
        mean, var = near + offset, (square - offset.square()).clamp(min=0.0)
        scale = (var + eps).rsqrt()
        ctx.save_for_backward(x, weight, mean, scale)
        out = torch.addcmul(_wide(bias - mean * scale * weight), wide, _wide(scale * weight)).to(x.dtype)
        count = x.numel() // x.shape[1] * num_ranks()
        unbiased = var * (count / max(count - 1, 1))
        ctx.mark_non_differentiable(mean, unbiased)
        return out, mean, unbiased

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, Tensor, None, None]:
        x, weight, mean, scale = ctx.saved_tensors
        gradient = gradients[0].float()
        normal = (x.float() - _wide(mean)) * _wide(scale)
        sums = torch.stack([gradient.sum(dim=(0, 2, 3)), (gradient * normal).sum(dim=(0, 2, 3))])
        grad_bias, grad_weight = sums.clone()  # this rank's own: the strategy averages them like all others
        dist.all_reduce(sums)
        mean_of, mean_of_product = sums * (x.shape[1] / x.numel() / num_ranks())
        inner = gradient - _wide(mean_of) - normal * _wide(mean_of_product)
        return (inner * _wide(scale * weight)).to(x.dtype), grad_weight, grad_bias, None, None


def _wide(channels: Tensor) -> Tensor:
    return channels[None, :, None, None]


class BatchNorm(nn.Module):
    """Over [batch, channels, height, width]. Statistics and arithmetic are fp32 in every precision.

    The output has the input's dtype, so under autocast activations between convolutions stay in 16 bits.
    """

    running_mean: Tensor
    running_var: Tensor

    def __init__(self, channels: int, mode: Literal["sync", "local"] = "sync") -> None:
        super().__init__()
        self.mode = mode
        self.weight = nn.Parameter(torch.empty(channels))
        self.bias = nn.Parameter(torch.empty(channels))
        self.register_buffer("running_mean", torch.empty(channels))
        self.register_buffer("running_var", torch.empty(channels))

    def forward(self, x: Tensor) -> Tensor:
        weight, bias = self.weight.float(), self.bias.float()  # fsdp may have gathered them in 16 bits
        if not self.training:
            return torch.batch_norm(x, weight, bias, self.running_mean, self.running_var, False, 0.0, EPS, True)
        if self.mode == "sync" and num_ranks() > 1:
            out, mean, var = normalize(x, weight, bias, self.running_mean, EPS)
        else:
            # momentum 1: they become the batch's own. Zeros, because 0 times uninitialized memory can be NaN
            mean, var = torch.zeros_like(weight), torch.zeros_like(weight)
            out = torch.batch_norm(x, weight, bias, mean, var, True, 1.0, EPS, True)
        self.remember(mean.detach(), var.detach())
        return out

    @torch.no_grad()
    def remember(self, mean: Tensor, var: Tensor) -> None:
        """Move the running statistics towards a batch's."""
        if not torch.compiler.is_compiling() and torch._C._current_graph_task_id() != -1:
            return  # inside a backward pass: activation checkpointing recomputes a layer that was already counted
        for running, new in ((self.running_mean, mean), (self.running_var, var)):
            # not from a non-finite batch, whose update is also skipped, nor the variance of a single value
            running.copy_(torch.where(torch.isfinite(new), running.lerp(new, MOMENTUM), running))

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> BatchNorm:
        """Move like every module, but never to 16 bits: DeepSpeed casts the whole module."""
        super()._apply(fn, recurse)
        for name in ("running_mean", "running_var"):
            setattr(self, name, getattr(self, name).float())
        return self


normalize = Normalize.apply
late_dynamo.shield(globals(), "normalize")  # a collective cannot be part of a graph


@torch.no_grad()
def average_statistics(model: nn.Module) -> None:
    """Average the running statistics of `local` norms over all ranks, at the end of a forward pass."""
    norms = [m for m in model.modules() if isinstance(m, BatchNorm) and m.mode == "local"]
    if not norms or num_ranks() == 1 or not model.training:
        return
    buffers = [b for norm in norms for b in (norm.running_mean, norm.running_var)]
    flat = torch.cat(buffers)
    dist.all_reduce(flat)
    for buffer, mean in zip(buffers, (flat / num_ranks()).split([b.numel() for b in buffers]), strict=True):
        buffer.copy_(mean)


late_dynamo.shield(globals(), "average_statistics")
