"""Head and loss as one operation: the mean cross-entropy of `x @ weight.T`, whose logits are never whole in memory.

The rows are taken in chunks. Of each chunk the logits are made, turned in place into their own gradient, multiplied
into the gradients of x and weight, and forgotten: the forward pass does the backward pass's work while the logits are
at hand, so nothing of the size rows × vocabulary is kept, nor computed twice. The backward pass only multiplies by
what comes in.

On a GPU one kernel reads and writes each row once (loss_gradient.py). With the vocabulary cut over tensor-parallel
ranks, and on a CPU, plain operations do the same.
"""

from __future__ import annotations

import contextlib
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from dtrain.kernels import chunk_rows, cublaslt
from dtrain.shards import chunks_of, is_dtensor

IGNORED = -100  # a target that does not count: padding, or a token that is not asked for


def linear_cross_entropy(x: Any, weight: Any, targets: Tensor, bias: Any = None) -> Tensor:
    """The mean loss over the targets that count, of hidden states [..., dim] and a matrix [vocabulary, dim].

    A weight that is a DTensor is cut by its rows over tensor-parallel ranks, which hold x whole.
    """
    group, first = None, 0
    if is_dtensor(weight):
        from torch.distributed.tensor import Partial

        group, first = weight.device_mesh.get_group(), chunks_of(weight.detach())[0].offset[0]
        x = x.to_local(grad_placements=[Partial()])  # each rank has a part of the sum that is x's gradient
        weight, bias = (t.to_local() if is_dtensor(t) else t for t in (weight, bias))
    # autograd's own question, which gradients are needed, does not ask whether any are
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
        # unscaled sums in float32, where that can be had: rounded once, when they are scaled
        wide = torch.float32 if device == "cuda" else dtype
        grad_x = torch.empty(x.shape, dtype=wide, device=x.device) if of_x else None
        # its first chunk is written, the others are added to it
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
                del logits  # before the next chunk's are made: 0.8 GiB of gpt2's peak
        share = 1.0 / (targets != IGNORED).sum().float()
        ctx.save_for_backward(grad_x, grad_weight, grad_bias, share)
        return losses.sum() * share

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        *sums, share = ctx.saved_tensors
        factor = gradient * share
        # In float32: beside 16-bit values torch would round the factor itself to 16 bits, for all of them. And not in
        # place: a pipeline schedule may ask twice, once for x's gradient and once for the weights'.
        return *(s if s is None else times(s, factor, t) for s, t in zip(sums, ctx.dtypes, strict=True)), *[None] * 4


# Graphs end here: what is inside is a few large kernels, and its loop would be unrolled for every batch size.
_linear_cross_entropy = torch.compiler.disable(LinearCrossEntropy.apply)


def times(total: Tensor, factor: Tensor, dtype: torch.dtype) -> Tensor:
    """The product of two float32 values, rounded once to `dtype`; the wide product is never written."""
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
    """total += a @ b in float32, without rounding the product to 16 bits first where that can be had."""
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
    """Fill in each row's loss, and put that loss's gradient in the place of its logits. An ignored row gets zeros.

    The loss of a target that is no column is NaN: it would be learnt as something else.
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
    mine = counts & (targets >= first) & (targets < first + logits.shape[1])  # whose target this rank has
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
