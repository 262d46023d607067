"""Attention of queries to some of their keys, such that several such results can be merged into the attention to all.

`attention` returns the output for one block of keys, and the log-sum-exp (lse) of each query's scores. `merge` weighs
two outputs by their lse. `gradients` needs the lse and the output over all keys: with them, the gradients of the blocks
add up.

All tensors are [batch, heads, length, head_dim], lse is [batch, heads, queries] in fp32. There may be fewer key heads
than query heads. `documents`: the document of each query, and of each key [batch, length]; a query sees the keys of its
own. A query that sees no key has an lse of -inf.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from dtrain.kernels import score_rows

aten = torch.ops.aten
FLASH = (torch.float16, torch.bfloat16)  # what the flash kernels of GPUs compute in
FLASH_CAPABILITY = (8, 0)  # of the GPUs that they run on: Ampere and later

Documents = tuple[Tensor, Tensor] | None


def attention(q: Tensor, k: Tensor, v: Tensor, is_causal: bool, documents: Documents = None) -> tuple[Tensor, Tensor]:
    """Return the output in fp32 and the lse. is_causal: as many queries as keys, each sees those up to it."""
    if not has_kernel(q, documents):
        return plain(q, k, v, is_causal, documents)
    if q.is_cuda:
        out, lse = aten._scaled_dot_product_flash_attention(q, k, v, 0.0, is_causal)[:2]
    else:
        k, v = (repeat_heads(x, q) for x in (k, v))
        out, lse = aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, is_causal)
    return out.float(), lse


def gradients(
    d_out: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, is_causal: bool,
    documents: Documents = None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Return what this block of keys adds to the gradients of q, k and v, in fp32.

    `out` and `lse`: the merged output and lse of these queries, `d_out` the gradient of that output.
    """
    if not has_kernel(q, documents):
        return plain_gradients(d_out, q, k, v, out, lse, is_causal, documents)
    d_out, out = d_out.to(q.dtype), out.to(q.dtype)
    lse = lse.contiguous()  # the CUDA kernel ignores its strides, those of a half of the queries for example
    if q.is_cuda:
        state = torch.empty(2, dtype=torch.uint64, device=q.device)  # of random numbers, for dropout
        found = aten._scaled_dot_product_flash_attention_backward(
            d_out, q, k, v, out, lse, None, None, q.shape[2], k.shape[2], 0.0, is_causal, state, state[0]
        )
    else:
        found = aten._scaled_dot_product_flash_attention_for_cpu_backward(
            d_out, q, repeat_heads(k, q), repeat_heads(v, q), out, lse, 0.0, is_causal
        )
    dq, dk, dv = (g.float() for g in found)
    return dq, summed(dk, k), summed(dv, v)


def has_kernel(q: Tensor, documents: Documents) -> bool:
    """Return whether torch has a kernel for these queries that also returns the lse."""
    if documents is not None:
        return False
    if not q.is_cuda:
        return True
    fits = q.dtype in FLASH and q.shape[3] % 8 == 0 and q.shape[3] <= 256
    return fits and torch.cuda.get_device_capability(q.device) >= FLASH_CAPABILITY


def merge(out: Tensor, lse: Tensor, other: Tensor, other_lse: Tensor) -> tuple[Tensor, Tensor]:
    """Return output and lse over the keys of both; each query must have seen a key in the first."""
    merged = torch.logaddexp(lse, other_lse)
    weights = [(part - merged).exp()[..., None] for part in (lse, other_lse)]
    return out * weights[0] + other * weights[1], merged


# ---- the same in plain operations: for documents, for fp32 on GPUs, and for GPUs without the kernel --------------
#
# Only the scores of some queries at a time are in memory (kernels.score_rows), two tensors of them in both passes.
# Their heads are those of the keys: the queries of heads that share one follow each other.


def plain(q: Tensor, k: Tensor, v: Tensor, is_causal: bool, documents: Documents) -> tuple[Tensor, Tensor]:
    q, k, v = by_key_head(q, k), k.float(), v.float()
    out = torch.empty(q.shape, dtype=torch.float32, device=q.device)
    lse = out.new_empty(q.shape[:-1])
    for rows, columns, mask in chunks(q, k, is_causal, documents):
        some = lse[..., rows]
        scores = scores_of(q[..., rows, :], k[:, :, columns], mask)
        some.copy_(scores.logsumexp(dim=-1).view_as(some))
        out[..., rows, :] = (probabilities(scores, some) @ v[:, :, columns]).unflatten(2, some.shape[2:])
    return out.flatten(1, 2), lse.flatten(1, 2)


def plain_gradients(
    d_out: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, is_causal: bool, documents: Documents
) -> tuple[Tensor, Tensor, Tensor]:
    q, d_out, out, lse = (by_key_head(x, k) for x in (q, d_out, out, lse))
    k, v = k.float(), v.float()
    dq = torch.empty(q.shape, dtype=torch.float32, device=q.device)
    dk, dv = torch.zeros_like(k), torch.zeros_like(v)
    for rows, columns, mask in chunks(q, k, is_causal, documents):
        some_q, some_d, some_out = (x[..., rows, :].flatten(2, 3).float() for x in (q, d_out, out))
        p = probabilities(scores_of(q[..., rows, :], k[:, :, columns], mask), lse[..., rows])
        dv[:, :, columns] += p.mT @ some_d
        d_scores = some_d @ v[:, :, columns].mT
        d_scores.sub_((some_d * some_out).sum(dim=-1, keepdim=True)).mul_(p).div_(math.sqrt(q.shape[-1]))
        dq[..., rows, :] = (d_scores @ k[:, :, columns]).unflatten(2, (q.shape[2], -1))
        dk[:, :, columns] += d_scores.mT @ some_q
    return dq.flatten(1, 2), dk, dv


def chunks(q: Tensor, k: Tensor, is_causal: bool, documents: Documents) -> Iterator[tuple[slice, slice, Tensor | None]]:
    """Yield some queries, the keys that they may see, and a mask that is true where they do."""
    batch, heads, shared, queries = q.shape[:4]
    size = score_rows(batch * heads * shared, k.shape[2])
    for first in range(0, queries, size):
        rows = slice(first, min(first + size, queries))
        columns = slice(rows.stop) if is_causal else slice(None)
        mask = None
        if documents is not None:
            of_queries, of_keys = documents
            mask = (of_queries[:, rows, None] == of_keys[:, None, columns])[:, None, None]
        if is_causal:
            causal = torch.ones(rows.stop - first, rows.stop, dtype=torch.bool, device=q.device).tril(first)
            mask = causal if mask is None else mask & causal
        yield rows, columns, mask


def scores_of(q: Tensor, k: Tensor, mask: Tensor | None) -> Tensor:
    """From [batch, key heads, query heads that share it, queries, head_dim] to [batch, key heads, both, keys]."""
    scores = (q.flatten(2, 3).float() @ k.mT).div_(math.sqrt(q.shape[-1]))
    if mask is not None:
        scores.unflatten(2, q.shape[2:4]).masked_fill_(~mask, -math.inf)
    return scores


def probabilities(scores: Tensor, lse: Tensor) -> Tensor:
    """Return them in the place of the scores. A query that sees no key has zeros, not NaN."""
    return scores.sub_(lse.masked_fill(lse == -math.inf, 0.0).flatten(2)[..., None]).exp_()


# ---- fewer heads of keys than of queries -------------------------------------------------------------------------


def by_key_head(x: Tensor, k: Tensor) -> Tensor:
    """From [batch, heads, …] to [batch, key heads, query heads that share it, …]."""
    return x.unflatten(1, (k.shape[1], -1))


def repeat_heads(x: Tensor, q: Tensor) -> Tensor:
    """Repeat each head of keys or values for the query heads that share it."""
    shared = q.shape[1] // x.shape[1]
    return x if shared == 1 else x.repeat_interleave(shared, dim=1)


def summed(gradient: Tensor, of: Tensor) -> Tensor:
    """Undo `repeat_heads` for a gradient: the sum over the query heads that share a head."""
    return gradient if gradient.shape == of.shape else by_key_head(gradient, of).sum(dim=2)
