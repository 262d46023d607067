"""Head and loss as one op: the mean cross-entropy of `x @ weight.T`, without ever having all logits in memory.

The rows are processed in chunks. The logits of a chunk are computed, turned in place into their own gradient,
multiplied into the gradients of x and weight, and freed. So the forward pass does the backward pass's work while it has
the logits, and nothing of the size rows × vocabulary is kept or computed twice. The backward pass only multiplies by
the incoming gradient.

On a GPU one kernel reads and writes each row once (loss_gradient.py). Plain ops do the same on a CPU, and where the
vocabulary is sharded over tensor-parallel ranks.
"""

from __future__ import annotations

import contextlib
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from dtrain.kernels import chunk_rows, cublaslt
from dtrain.util import late_dynamo
from dtrain.util.dtensor import chunks_of, is_dtensor

IGNORED = -100  # a target that does not count: padding, or a token without a prediction


def linear_cross_entropy(x: Any, weight: Any, targets: Tensor, bias: Any = None) -> Tensor:
    """Return the mean loss over the targets that count, for hidden states [..., dim] and a matrix [vocabulary, dim].

    A DTensor weight is sharded by rows over tensor-parallel ranks, all of which hold the full x.
    """
    group, first = None, 0
    if is_dtensor(weight):
        from torch.distributed.tensor import Partial

        group, first = weight.device_mesh.get_group(), chunks_of(weight.detach())[0].offset[0]
        x = x.to_local(grad_placements=[Partial()])  # each rank has a partial sum of x's gradient
        weight, bias = (t.to_local() if is_dtensor(t) else t for t in (weight, bias))
    # needs_input_grad is true even if gradients are disabled
    wanted = torch.is_grad_enabled()
    return _linear_cross_entropy(x.flatten(0, -2), weight, bias, targets.flatten(), group, first, wanted)


class LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, group: Any, first: int, wanted: bool
    ) -> Tensor:
        device = x.device.type
        dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else x.dtype
        ctx.dtypes = x.dtype, weight.dtype, None if bias is None else bias.dtype
        x, weight, bias = x.to(dtype), weight.to(dtype), None if bias is None else bias.to(dtype)
        of_x, of_weight, of_bias = (wanted and ctx.needs_input_grad[i] for i in range(3))
        losses = torch.empty(len(x), dtype=torch.float32, device=x.device)
        # unscaled sums, in fp32 if possible: rounded once, when they are scaled
        wide = torch.float32 if device == "cuda" else dtype
        grad_x = torch.empty(x.shape, dtype=wide, device=x.device) if of_x else None
        # the first chunk is written, the others are added to it
        grad_weight = torch.empty(weight.shape, dtype=torch.float32, device=x.device) if of_weight else None
        grad_bias = torch.zeros(weight.shape[0], dtype=torch.float32, device=x.device) if of_bias else None
        rows = chunk_rows(len(x), weight.shape[0])
        with torch.autocast(device, enabled=False) if device != "meta" else contextlib.nullcontext():
            for i in range(0, len(x), rows):
                part = slice(i, i + rows)
                logits = logits_of(x[part], weight, bias)
                to_gradient(logits, targets[part], losses[part], any((of_x, of_weight, of_bias)), group, first)
                if grad_x is not None:
                    product(grad_x[part], logits, weight)
                if grad_weight is not None:
                    add_product(grad_weight, logits.T, x[part], is_first=i == 0)
                if grad_bias is not None:
                    grad_bias += logits.sum(dim=0, dtype=torch.float32)
                del logits  # before the next chunk's are allocated: 0.8 GiB of gpt2's peak
        share = 1.0 / (targets != IGNORED).sum().clamp(min=1).float()  # a part of a sequence may have no target
        ctx.save_for_backward(grad_x, grad_weight, grad_bias, share)
        return losses.sum() * share

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        *sums, share = ctx.saved_tensors
        factor = gradient * share
        # In fp32: with 16-bit values torch would round the factor itself to 16 bits. Not in place: a pipeline schedule
        # may call this twice, for x's gradient and for the weights'.
        return *(s if s is None else times(s, factor, t) for s, t in zip(sums, ctx.dtypes, strict=True)), *[None] * 4


# Graph break: inside are a few large kernels, and the loop would be unrolled for every batch size.
_linear_cross_entropy = LinearCrossEntropy.apply
late_dynamo.shield(globals(), "_linear_cross_entropy")


def times(total: Tensor, factor: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the product of two fp32 values, rounded once to `dtype`, without an fp32 temporary."""
    return torch.mul(total.float(), factor, out=torch.empty_like(total, dtype=dtype))


def logits_of(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    logits = x.new_empty(len(x), len(weight))
    if not (x.is_cuda and cublaslt.multiply(logits, x, weight.T, bias)):
        torch.mm(x, weight.T, out=logits) if bias is None else torch.addmm(bias, x, weight.T, out=logits)
    return logits


def product(out: Tensor, a: Tensor, b: Tensor) -> None:
    if out.is_cuda and cublaslt.multiply(out, a, b):
        return
    if out.dtype != a.dtype:
        torch.mm(a, b, out_dtype=out.dtype, out=out)
    else:
        torch.mm(a, b, out=out)


def add_product(total: Tensor, a: Tensor, b: Tensor, is_first: bool) -> None:
    """total += a @ b in fp32, if possible without rounding the matmul to 16 bits first."""
    if total.is_cuda and cublaslt.multiply(total, a, b, adds=not is_first):
        return
    if total.is_cuda and a.dtype != torch.float32:
        if is_first:
            torch.mm(a, b, out_dtype=torch.float32, out=total)
        else:
            torch.addmm(total, a, b, out_dtype=torch.float32, out=total)
    elif is_first:
        total.copy_(a @ b)
    else:
        total.add_(a @ b)


def to_gradient(logits: Tensor, targets: Tensor, losses: Tensor, wanted: bool, group: Any, first: int) -> None:
    """Write each row's loss, and replace its logits by the loss's gradient. An ignored row gets zeros.

    A target outside the vocabulary gives a NaN loss: otherwise the model would learn another target.
    """
    if logits.is_cuda and group is None:
        from dtrain.kernels.loss_gradient import launch

        return launch(logits, targets, losses, wanted)
    counts = targets != IGNORED
    wide = logits.float()
    top = wide.amax(dim=1)
    if group is not None:
        dist.all_reduce(top, dist.ReduceOp.MAX, group)
    powers = (wide - top[:, None]).exp_()
    mine = counts & (targets >= first) & (targets < first + logits.shape[1])  # this rank has the target
    column = torch.where(mine, targets - first, 0)[:, None]
    sums = torch.stack([powers.sum(dim=1), torch.where(mine, wide.gather(1, column)[:, 0], 0.0), mine.float()])
    if group is not None:
        dist.all_reduce(sums, group=group)
    total, right, found = sums
    losses.copy_(torch.where(counts, top + total.log() - torch.where(found > 0, right, torch.nan), 0.0))
    if wanted:
        powers /= total[:, None]
        powers.scatter_add_(1, column, -mine[:, None].float())
        logits.copy_(powers * counts[:, None])
