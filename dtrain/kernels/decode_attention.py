"""Attention of one new token per sequence over its own cached keys, for continuous batching on a GPU.

Each sequence of a batch has its own length, read in the kernel: shapes stay the same from step to step, so the whole
step can be one CUDA graph, and no sequence reads further than its own end. Query heads that share a key head are one
tile. Long sequences are divided among several programs, which a second kernel combines (flash-decoding). The kernel
also stores the new key and value, which saves a launch per layer.
"""

from __future__ import annotations

from typing import Any

import torch
import triton  # type: ignore[import-not-found, unused-ignore]
import triton.language as tl  # type: ignore[import-not-found, unused-ignore]
from torch import Tensor

from dtrain.kernels.one_row import begins_early, follow

BLOCK = 64  # keys per iteration
PROGRAMS = 264  # two per multiprocessor of an H200
TILE = 16  # least rows of a tensor-core tile: query heads per key head are padded to it


@triton.jit
def attend_part(  # type: ignore[no-untyped-def]
    q, new_k, new_v, keys, values, rows, lengths, partial, most, total, scale, capacity,
    KV_HEADS: tl.constexpr, SHARED: tl.constexpr, HEADS: tl.constexpr, DIM: tl.constexpr, PARTS: tl.constexpr,
    BLOCK: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """A program takes one part of one sequence's keys, for the query heads of one key head."""
    follow(EARLY)
    sequence, head, part = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    length = tl.load(lengths + sequence).to(tl.int32)  # the new token's place
    num_blocks = tl.cdiv(length + 1, BLOCK)
    per_part = tl.cdiv(num_blocks, PARTS)
    first = part * per_part
    last = tl.minimum(first + per_part, num_blocks)
    h, d = tl.arange(0, HEADS), tl.arange(0, DIM)
    of_query = (sequence * KV_HEADS + head) * SHARED + h
    queries = tl.load(q + of_query[:, None] * DIM + d[None, :], mask=h[:, None] < SHARED, other=0.0)
    key = tl.load(new_k + (sequence * KV_HEADS + head) * DIM + d)
    value = tl.load(new_v + (sequence * KV_HEADS + head) * DIM + d)
    start = (tl.load(rows + sequence).to(tl.int64) * KV_HEADS + head) * capacity * DIM
    if (first * BLOCK <= length) & (length < last * BLOCK):  # no other program reads or writes this place
        tl.store(keys + start + length * DIM + d, key)
        tl.store(values + start + length * DIM + d, value)
    largest = tl.full([HEADS], float("-inf"), tl.float32)
    weight = tl.zeros([HEADS], tl.float32)
    out = tl.zeros([HEADS, DIM], tl.float32)
    for block in range(first, last):
        n = block * BLOCK + tl.arange(0, BLOCK)
        places = start + n[:, None] * DIM + d[None, :]
        k = tl.load(keys + places, mask=n[:, None] < length, other=0.0)
        k = tl.where(n[:, None] == length, key[None, :], k)
        scores = tl.dot(queries, tl.trans(k), input_precision="ieee") * scale
        scores = tl.where(n[None, :] <= length, scores, float("-inf"))
        now = tl.maximum(largest, tl.max(scores, 1))
        p = tl.exp(scores - now[:, None])
        fade = tl.exp(largest - now)
        v = tl.load(values + places, mask=n[:, None] < length, other=0.0)
        v = tl.where(n[:, None] == length, value[None, :], v)
        weight = weight * fade + tl.sum(p, 1)
        out = out * fade[:, None] + tl.dot(p.to(v.dtype), v, input_precision="ieee")
        largest = now
    of_part = of_query * PARTS + part
    tl.store(partial + of_part[:, None] * DIM + d[None, :], out, mask=h[:, None] < SHARED)
    tl.store(most + of_part, largest, mask=h < SHARED)
    tl.store(total + of_part, weight, mask=h < SHARED)


@triton.jit
def combine(  # type: ignore[no-untyped-def]
    partial, most, total, result, DIM: tl.constexpr, PARTS: tl.constexpr, EARLY: tl.constexpr
):  # fmt: skip
    """A program combines the parts of one query head. A part without keys has the weight 0."""
    follow(EARLY)
    head = tl.program_id(0)
    p, d = tl.arange(0, PARTS), tl.arange(0, DIM)
    largest = tl.load(most + head * PARTS + p)
    share = tl.exp(largest - tl.max(largest, 0))
    weight = tl.sum(tl.load(total + head * PARTS + p) * share, 0)
    parts = tl.load(partial + (head * PARTS + p)[:, None] * DIM + d[None, :])
    out = tl.sum(parts * share[:, None], 0) / weight
    tl.store(result + head * DIM + d, out.to(result.dtype.element_ty))


def supports(head_dim: int, dtype: torch.dtype) -> bool:
    return 16 <= head_dim <= 256 and head_dim & (head_dim - 1) == 0 and dtype.itemsize in (2, 4)


def num_parts(sequences: int, kv_heads: int) -> int:
    """Return among how many programs a sequence is divided: it depends on the batch's shape only."""
    return 1 << (max(1, min(64, PROGRAMS // (sequences * kv_heads))).bit_length() - 1)  # a power of two


@torch.library.custom_op("dtrain::decode_attention", mutates_args=("keys", "values"))
def decode_attention(
    q: Tensor, k: Tensor, v: Tensor, keys: Tensor, values: Tensor, rows: Tensor, lengths: Tensor
) -> Tensor:
    """Return attention [batch, heads, 1, dim] of one token per sequence, and add its key and value to the cache.

    q, k, v: [batch, (kv) heads, 1, dim]; keys, values: [slots, kv heads, capacity, dim]; rows: each sequence's slot;
    lengths: how many tokens it has there.
    """
    batch, heads, _, dim = q.shape
    kv_heads, capacity = keys.shape[1], keys.shape[2]
    parts = num_parts(batch, kv_heads)
    partial = torch.empty(batch * heads * parts * dim, dtype=torch.float32, device=q.device)
    most, total = torch.empty(2, batch * heads * parts, dtype=torch.float32, device=q.device)
    out = torch.empty(batch, heads, 1, dim, dtype=q.dtype, device=q.device)
    shared = heads // kv_heads
    early = begins_early(q.device)
    launch: dict[str, Any] = {"EARLY": early} | ({"launch_pdl": True} if early else {})
    first: Any = attend_part[(batch, kv_heads, parts)]
    first(
        q.contiguous(), k.contiguous(), v.contiguous(), keys, values, rows, lengths, partial, most, total, dim**-0.5,
        capacity, KV_HEADS=kv_heads, SHARED=shared, HEADS=max(TILE, triton.next_power_of_2(shared)), DIM=dim,
        PARTS=parts, BLOCK=BLOCK, **launch,
    )  # fmt: skip
    second: Any = combine[(batch * heads,)]
    second(partial, most, total, out, DIM=dim, PARTS=parts, num_warps=1 if parts * dim <= 2048 else 4, **launch)
    return out


@decode_attention.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, keys: Tensor, values: Tensor, rows: Tensor, lengths: Tensor) -> Tensor:
    return torch.empty(q.shape, dtype=q.dtype, device=q.device)
