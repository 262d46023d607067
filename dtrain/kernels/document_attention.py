"""Causal attention within packed documents, by torch's FlexAttention: what no query sees is not computed.

Sequences are divided into blocks of BLOCK tokens. Documents lie one after the other, so which blocks see each other
follows from the documents of each block's first and last token. It is computed on the device, from tensors whose shape
does not depend on how many documents there are: no step waits for the host or is compiled again.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

BLOCK = 128
KINDS = (torch.float16, torch.bfloat16)  # in float32 its kernels are slower than scores in memory
LEAST_DIM = 16  # of a head


def supports(q: Tensor) -> bool:
    return q.is_cuda and q.dtype in KINDS and q.shape[3] >= LEAST_DIM


def attention(q: Tensor, k: Tensor, v: Tensor, documents: Tensor) -> Tensor:
    """Return [batch, heads, length, head_dim] of such tensors; documents: each token's number [batch, length]."""
    from torch.nn.attention.flex_attention import flex_attention

    # outside of a compiled region only a compiled function has a kernel; tests call it as it is
    flex: Any = flex_attention if torch.compiler.is_compiling() or not q.is_cuda else compiled()
    out: Tensor = flex(q, k, v, block_mask=block_mask(documents), enable_gqa=q.shape[1] != k.shape[1])
    return out


@cache
def compiled() -> Any:
    from torch.nn.attention.flex_attention import flex_attention

    return torch.compile(flex_attention, dynamic=False)


def block_mask(documents: Tensor) -> Any:
    """Return which blocks of keys each block of queries sees: wholly, or as `seen` says for each pair of tokens."""
    from torch.nn.attention.flex_attention import BlockMask

    length = documents.shape[1]
    # a document of its own for what fills the last block
    ends = F.pad(documents, (0, -length % BLOCK), value=length + 1).unflatten(1, (-1, BLOCK))
    first, last = ends[..., 0], ends[..., -1]
    order = torch.arange(first.shape[1], device=documents.device)
    earlier = order[:, None] > order
    touches = last[:, None, :] >= first[:, :, None]  # of earlier blocks
    same = (first == last)[:, :, None] & (first == last)[:, None, :] & (first[:, :, None] == first[:, None, :])
    whole = earlier & same
    partly = (earlier & touches & ~same) | (order[:, None] == order)

    def seen(b: Tensor, h: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return (query >= key) & (documents[b, query] == documents[b, key])

    return BlockMask.from_kv_blocks(
        *listed(partly), *listed(whole), BLOCK_SIZE=BLOCK, mask_mod=seen, seq_lengths=(length, length)
    )


def listed(mask: Tensor) -> tuple[Tensor, Tensor]:
    """Return how many are true in each row of [batch, queries, keys], and their places, which come first."""
    mask = mask[:, None]
    return mask.sum(dim=-1, dtype=torch.int32), mask.int().argsort(dim=-1, descending=True, stable=True).int()
