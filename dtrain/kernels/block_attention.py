"""Attention of queries to some of their keys, such that several such results can be merged into the attention to all.

`attention` returns the output for one block of keys, and each query's log-sum-exp over them. `merge` weighs two outputs
by these. `gradients` needs the log-sum-exp and the output over all keys: with them, the gradients of the blocks add up.

All tensors are [batch, heads, length, head_dim], log-sum-exp is [batch, heads, queries] in fp32. There may be fewer key
heads than query heads. A mask is true where a query sees a key; queries that see no key have a log-sum-exp of -inf.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

aten = torch.ops.aten
FLASH = (torch.float16, torch.bfloat16)  # what the flash kernels of GPUs compute in


def attention(q: Tensor, k: Tensor, v: Tensor, is_causal: bool, mask: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Return the output in fp32 and the log-sum-exp. is_causal: as many queries as keys, each sees those up to it."""
    if not has_kernel(q, mask):
        return plain(q, k, v, mask_of(q, k, is_causal, mask))
    if q.is_cuda:
        out, total = aten._scaled_dot_product_flash_attention(q, k, v, 0.0, is_causal)[:2]
    else:
        out, total = aten._scaled_dot_product_flash_attention_for_cpu(q, *repeated(q, k, v), 0.0, is_causal)
    return out.float(), total


def gradients(
    d_out: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, total: Tensor, is_causal: bool,
    mask: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Return what this block of keys adds to the gradients of q, k and v, in fp32.

    `out` and `total`: the merged output and log-sum-exp of these queries, `d_out` the gradient of that output.
    """
    if not has_kernel(q, mask):
        return plain_gradients(d_out, q, k, v, out, total, mask_of(q, k, is_causal, mask))
    d_out, out = d_out.to(q.dtype), out.to(q.dtype)
    if q.is_cuda:
        state = torch.empty(2, dtype=torch.uint64, device=q.device)  # of random numbers, for dropout
        found = aten._scaled_dot_product_flash_attention_backward(
            d_out, q, k, v, out, total, None, None, q.shape[2], k.shape[2], 0.0, is_causal, state, state[0]
        )
    else:
        found = aten._scaled_dot_product_flash_attention_for_cpu_backward(
            d_out, q, *repeated(q, k, v), out, total, 0.0, is_causal
        )
    dq, dk, dv = (g.float() for g in found)
    return dq, summed(dk, k), summed(dv, v)


def has_kernel(q: Tensor, mask: Tensor | None) -> bool:
    """Return whether torch has a kernel for these queries that also returns the log-sum-exp."""
    return mask is None and (not q.is_cuda or (q.dtype in FLASH and q.shape[3] % 8 == 0 and q.shape[3] <= 256))


def merge(out: Tensor, total: Tensor, other: Tensor, other_total: Tensor) -> tuple[Tensor, Tensor]:
    """Return output and log-sum-exp over the keys of both; each query must have seen a key in the first."""
    merged = torch.logaddexp(total, other_total)
    weights = [(part - merged).exp()[..., None] for part in (total, other_total)]
    return out * weights[0] + other * weights[1], merged


# ---- the same in plain operations: for masks, and for fp32 on GPUs ---------------------------------------------


def plain(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor]:
    k, v = repeated(q, k, v)
    scores = scores_of(q, k, mask)
    total = scores.logsumexp(dim=-1)
    return probabilities(scores, total) @ v.float(), total


def plain_gradients(
    d_out: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, total: Tensor, mask: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    wide_k, wide_v = (x.float() for x in repeated(q, k, v))
    q, d_out, out = q.float(), d_out.float(), out.float()
    p = probabilities(scores_of(q, wide_k, mask), total)
    d_scores = p * (d_out @ wide_v.mT - (d_out * out).sum(dim=-1, keepdim=True)) / math.sqrt(q.shape[-1])
    return d_scores @ wide_k, summed(d_scores.mT @ q, k), summed(p.mT @ d_out, v)


def scores_of(q: Tensor, k: Tensor, mask: Tensor | None) -> Tensor:
    scores = q.float() @ k.float().mT / math.sqrt(q.shape[-1])
    return scores if mask is None else scores.masked_fill(~mask, -math.inf)


def probabilities(scores: Tensor, total: Tensor) -> Tensor:
    """A query that sees no key has zeros, not NaN."""
    return (scores - total.masked_fill(total == -math.inf, 0.0)[..., None]).exp()


def mask_of(q: Tensor, k: Tensor, is_causal: bool, mask: Tensor | None) -> Tensor | None:
    if not is_causal:
        return mask
    causal = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool, device=q.device).tril()
    return causal if mask is None else mask & causal


def repeated(q: Tensor, *shared: Tensor) -> Any:
    """Repeat each head of keys and values for the query heads that share it."""
    times = q.shape[1] // shared[0].shape[1]
    return shared if times == 1 else tuple(x.repeat_interleave(times, dim=1) for x in shared)


def summed(gradient: Tensor, of: Tensor) -> Tensor:
    """Undo `repeated` for a gradient: the sum over the query heads that share a head."""
    if gradient.shape[1] == of.shape[1]:
        return gradient
    return gradient.unflatten(1, (of.shape[1], -1)).sum(dim=2)
