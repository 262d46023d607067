"""Stochastic rounding to bf16 with plain ops: the same bits as the kernel of adamw.py.

A number between two neighbours is rounded up with a probability equal to its relative distance from the lower one. So
many updates that are each too small to change a value add up correctly on average. Rounding to nearest would lose every
one of them.
"""

from __future__ import annotations

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


def words(count: int, seed: int, step: int, tensor: int, first: int, device: torch.device) -> Tensor:
    """Return a random word for each of `count` elements of a tensor's shard that begins at element `first`.

    An element's word depends on seed, step, tensor and its own index: not on which rank holds it, or with what else.
    """
    begin = quad(first)
    quads = torch.arange(begin, begin + -(-count // 4), device=device)
    rest = torch.zeros_like(quads)
    return torch.stack(philox(seed, (quads, rest + tensor, rest + step, rest)), dim=1).view(-1)[:count]


def quad(first: int) -> int:
    """Four elements share one draw; a shard that begins within four starts with the next."""
    return -(-first // 4)


def rounded(x: Tensor, noise: Tensor) -> Tensor:
    """fp32 to bf16: add 16 random bits below the last kept bit, and truncate. NaN stays NaN."""
    cut = (x.view(torch.int32) + noise.to(torch.int32)) & -(1 << 16)
    return torch.where(x.isnan(), x, cut.view(torch.float32)).bfloat16()
