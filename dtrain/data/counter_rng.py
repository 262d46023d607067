"""Random bits from counters: a sample's draws need no generator state, so any sample can be recreated on its own."""

from __future__ import annotations

import numpy as np

GOLDEN = np.uint64(0x9E3779B97F4A7C15)  # splitmix64's increment


def mix(x: np.ndarray) -> np.ndarray:
    """splitmix64's output function on uint64: neighbouring counters give unrelated bits. Arrays only: it wraps."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def bits(keys: np.ndarray, count: int) -> np.ndarray:
    """Return uint64 [len(keys), count]: that many draws for each key."""
    return mix(keys[:, None] + (np.arange(count, dtype=np.uint64) + np.uint64(1)) * GOLDEN)


def sample_keys(seed: int, epoch: int, indices: np.ndarray) -> np.ndarray:
    """Return one uint64 per sample, from (seed, epoch, sample): augmentation and masking draw from it.

    It uses raw Philox bits and integer arithmetic: numpy guarantees those across releases (NEP 19), and a run that
    resumes after an upgrade must see the same draws. The 1 separates them from the bits that shuffle the epoch.
    """
    base = np.random.Philox(np.random.SeedSequence([seed, epoch, 1])).random_raw(1)
    return mix(base + np.asarray(indices).astype(np.uint64) * GOLDEN)
