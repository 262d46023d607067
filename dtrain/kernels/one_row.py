"""The matrix products of one token, where the time is that of reading the weights.

A token of one sequence is a vector in every layer, and each weight is read once for it. A product here is one kernel:
a program takes a few rows of the matrix over their whole length, and what stands before or after the product (RMS norm,
rotation, SiLU, residual) is in the same kernel. Where the GPU can, a kernel begins while the one before it ends, and
reads its first weights before it waits for its input (programmatic dependent launch, from compute capability 9).

Each value is rounded to 16 bits where the model's own operations do it, but for the normalized input: the norm's scale
is known only when all of the input has been read, and multiplies the sums.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
import triton  # type: ignore[import-not-found, unused-ignore]
import triton.language as tl  # type: ignore[import-not-found, unused-ignore]
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait  # type: ignore[import-not-found, unused-ignore]

MOST_COLUMNS = 2048  # of a tile
PAIRS = 2  # of rows that are rotated together, in a program
ROWS = 4  # of a program
ROWS_LONG = 1  # of a program whose rows have more than LONG columns
LONG = 4096


@triton.jit
def part_of(x, norm, at, NORM: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """A block of the input as a row, times the norm's weight, and its squares."""
    k = at + tl.arange(0, BLOCK)
    value = tl.load(x + k).to(tl.float32)
    squares = value * value
    if NORM:
        value *= tl.load(norm + k).to(tl.float32)
    return value[None, :], squares


@triton.jit
def inverse_rms(squares, eps, K: tl.constexpr):  # type: ignore[no-untyped-def]
    return 1 / tl.sqrt(tl.sum(squares, 0) / K + eps)


@triton.jit
def follow(EARLY: tl.constexpr):  # type: ignore[no-untyped-def]
    """Wait for the kernel before, and let the next one begin to read its weights."""
    if EARLY:
        gdc_wait()
        gdc_launch_dependents()


@triton.jit
def rotated_kernel(  # type: ignore[no-untyped-def]
    x, norm, eps, q, k, v, cos, sin, out, HEADS: tl.constexpr, KV_HEADS: tl.constexpr, DIM: tl.constexpr,
    K: tl.constexpr, PAIRS: tl.constexpr, BLOCK: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """`out`: all heads' queries, keys and values. A program has PAIRS elements of a half of a head and their pairs."""
    half: tl.constexpr = DIM // 2
    first = tl.program_id(0) * PAIRS
    head, start = first // half, first % half
    weight, row = q, head * DIM
    if head >= HEADS + KV_HEADS:
        weight, row = v, (head - HEADS - KV_HEADS) * DIM
    elif head >= HEADS:
        weight, row = k, (head - HEADS) * DIM
    n = tl.arange(0, 2 * PAIRS)
    places = weight + (row + start + n // 2 + n % 2 * half)[:, None] * K + tl.arange(0, BLOCK)[None, :]
    tile = tl.load(places, eviction_policy="evict_first")
    follow(EARLY)
    part, squares = part_of(x, norm, 0, True, BLOCK)
    sums = tile.to(tl.float32) * part
    for at in range(BLOCK, K, BLOCK):
        tile = tl.load(places + at, eviction_policy="evict_first")
        part, more = part_of(x, norm, at, True, BLOCK)
        squares += more
        sums += tile.to(tl.float32) * part
    kind: tl.constexpr = out.dtype.element_ty
    result = (tl.sum(sums, 1) * inverse_rms(squares, eps, K)).to(kind).to(tl.float32)
    a, b = tl.split(tl.reshape(result, [PAIRS, 2]))
    i = start + tl.arange(0, PAIRS)
    is_value = head >= HEADS + KV_HEADS
    c = tl.where(is_value, 1.0, tl.load(cos + i))
    s = tl.where(is_value, 0.0, tl.load(sin + i))
    tl.store(out + head * DIM + i, (a * c - b * s).to(kind))
    tl.store(out + head * DIM + i + half, (b * c + a * s).to(kind))


@triton.jit
def gated_kernel(  # type: ignore[no-untyped-def]
    x, norm, eps, gate, up, out, K: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, EARLY: tl.constexpr
):  # fmt: skip
    """SiLU(gate) × up of the normalized input."""
    n = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    places = n[:, None] * K + tl.arange(0, BLOCK)[None, :]
    tile = tl.load(gate + places, eviction_policy="evict_first")
    other = tl.load(up + places, eviction_policy="evict_first")
    follow(EARLY)
    part, squares = part_of(x, norm, 0, True, BLOCK)
    gates, ups = tile.to(tl.float32) * part, other.to(tl.float32) * part
    for at in range(BLOCK, K, BLOCK):
        tile = tl.load(gate + places + at, eviction_policy="evict_first")
        other = tl.load(up + places + at, eviction_policy="evict_first")
        part, more = part_of(x, norm, at, True, BLOCK)
        squares += more
        gates += tile.to(tl.float32) * part
        ups += other.to(tl.float32) * part
    kind: tl.constexpr = out.dtype.element_ty
    scale = inverse_rms(squares, eps, K)
    g = (tl.sum(gates, 1) * scale).to(kind).to(tl.float32)
    active = (g / (1 + tl.exp(-g))).to(kind).to(tl.float32)
    tl.store(out + n, (active * (tl.sum(ups, 1) * scale).to(kind).to(tl.float32)).to(kind))


@triton.jit
def added_kernel(  # type: ignore[no-untyped-def]
    x, weight, residual, out, K: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, EARLY: tl.constexpr
):  # fmt: skip
    """The residual plus a product."""
    n = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    places = weight + n[:, None] * K + tl.arange(0, BLOCK)[None, :]
    tile = tl.load(places, eviction_policy="evict_first")
    follow(EARLY)
    before = tl.load(residual + n).to(tl.float32)
    sums = tile.to(tl.float32) * part_of(x, x, 0, False, BLOCK)[0]
    for at in range(BLOCK, K, BLOCK):
        tile = tl.load(places + at, eviction_policy="evict_first")
        sums += tile.to(tl.float32) * part_of(x, x, at, False, BLOCK)[0]
    kind: tl.constexpr = out.dtype.element_ty
    tl.store(out + n, (before + tl.sum(sums, 1).to(kind).to(tl.float32)).to(kind))


def rotated(
    x: Tensor, norm: Tensor, eps: float, q: Tensor, k: Tensor, v: Tensor, rotary: Tensor, dim: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the rotated queries and keys and the values, each [1, heads, 1, dim], of x [1, 1, width]."""
    heads, kv_heads = len(q) // dim, len(k) // dim
    out = x.new_empty(1, heads + 2 * kv_heads, 1, dim)
    launch(
        rotated_kernel, out.numel() // (2 * PAIRS), x, norm, eps, q, k, v, rotary[0], rotary[1], out, HEADS=heads,
        KV_HEADS=kv_heads, DIM=dim, K=x.shape[-1], PAIRS=PAIRS,
    )  # fmt: skip
    return out[:, :heads], out[:, heads : heads + kv_heads], out[:, heads + kv_heads :]


def gated(x: Tensor, norm: Tensor, eps: float, gate: Tensor, up: Tensor) -> Tensor:
    out = x.new_empty(1, 1, len(gate))
    launch(gated_kernel, len(gate) // PAIRS, x, norm, eps, gate, up, out, K=x.shape[-1], ROWS=PAIRS)
    return out


def added(x: Tensor, weight: Tensor, residual: Tensor) -> Tensor:
    out = torch.empty_like(residual)
    rows = ROWS if x.shape[-1] <= LONG else ROWS_LONG
    launch(added_kernel, len(weight) // rows, x, weight, residual, out, K=x.shape[-1], ROWS=rows)
    return out


def launch(kernel: Any, programs: int, x: Tensor, *given: Any, **constants: Any) -> None:
    early = begins_early(x.device)
    more: dict[str, Any] = {"launch_pdl": True} if early else {}
    kernel[(programs,)](x, *given, **constants, BLOCK=columns(x.shape[-1]), EARLY=early, num_warps=4, **more)


@cache
def begins_early(device: torch.device) -> bool:
    if device.type != "cuda" or torch.version.hip is not None:
        return False
    return torch.cuda.get_device_capability(device) >= (9, 0)


def columns(width: int) -> int:
    """Return the columns of a tile: it has no remainder, so no masks."""
    return min(width & -width, MOST_COLUMNS)


def supports(weights: list[Tensor], dim: int) -> bool:
    """Can these matrices be read so? They are contiguous, 16 bits wide, and divide into whole programs."""
    return dim % (2 * PAIRS) == 0 and all(
        weight.dtype.itemsize == 2 and weight.is_contiguous() and columns(weight.shape[1]) >= 128
        and len(weight) % ROWS == 0
        for weight in weights
    )  # fmt: skip
