"""Stochastic rounding to bf16 with plain ops: the same bits as the kernel of adamw.py.

A number between two neighbours is rounded up with a probability equal to its relative distance from the lower one. So
many updates that are each too small to change a value add up correctly on average. Rounding to nearest would lose every
one of them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

WORD = 0xFFFFFFFF
FACTORS, KEYS = (0xD2511F53, 0xCD9E8D57), (0x9E3779B9, 0xBB67AE85)  # Philox-4x32 constants (Salmon et al., 2011)


def philox(seed: int, counters: tuple[Tensor, Tensor, Tensor, Tensor]) -> list[Tensor]:
    """Philox-4x32-10: return four random 32-bit words for each set of counters, all as int64."""
    c0, c1, c2, c3 = counters
    k0, k1 = seed & WORD, seed >> 32 & WORD
    for _ in range(10):
        a, b = c0 * FACTORS[0], c2 * FACTORS[1]  # may exceed 2^63: then they wrap, and each bit is still right
        c0, c1, c2, c3 = b >> 32 & WORD ^ c1 ^ k0, b & WORD, a >> 32 & WORD ^ c3 ^ k1, a & WORD
        k0, k1 = k0 + KEYS[0] & WORD, k1 + KEYS[1] & WORD
    return [c0, c1, c2, c3]


class Place(NamedTuple):
    """Where a shard lies in its tensor, for the draws: `row` draws are for each of its rows, `skip` for other shards.

    Four elements share one draw; a shard that begins within four starts with the next.
    """

    first: int = 0  # draw
    row: int = 1
    skip: int = 0  # 0 for whole rows: then `row` means nothing


WHOLE = Place()


def place_of(whole: Sequence[int], offset: Sequence[int], shape: Sequence[int]) -> Place:
    """Return the place of a box: some rows of a tensor, or of a matrix also some columns."""
    begin = sum(o * math.prod(whole[dim + 1 :]) for dim, o in enumerate(offset))
    if len(whole) != 2 or shape[1] == whole[1]:
        return Place(-(-begin // 4))
    return Place(-(-begin // 4), max(1, shape[1] // 4), (whole[1] - shape[1]) // 4)


def words(
    count: int, seed: int, step: int, tensor: int, device: torch.device, place: Place = WHOLE, begin: int = 0
) -> Tensor:
    """Return a random word for each of `count` elements of a tensor's shard, from its element `begin` on.

    An element's word depends on seed, step, tensor and its own index: not on which rank holds it, or with what else.
    """
    quads = torch.arange(begin // 4, begin // 4 + -(-count // 4), device=device)
    quads = place.first + quads + quads // place.row * place.skip
    rest = torch.zeros_like(quads)
    return torch.stack(philox(seed, (quads, rest + tensor, rest + step, rest)), dim=1).view(-1)[:count]


def rounded(x: Tensor, noise: Tensor) -> Tensor:
    """fp32 to bf16: add 16 random bits below the last kept bit, and truncate. NaN stays NaN."""
    cut = (x.view(torch.int32) + noise.to(torch.int32)) & -(1 << 16)
    return torch.where(x.isnan(), x, cut.view(torch.float32)).bfloat16()
