"""Seed Python's, numpy's and torch's global generators for the user's data code, and restore them afterwards."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterator

import numpy as np
import torch


@contextlib.contextmanager
def own_draws() -> Iterator[None]:
    """Restore the random generators afterwards: those of the model are not the data's."""
    state = random.getstate(), np.random.get_state(), torch.get_rng_state()
    try:
        yield
    finally:
        random.setstate(state[0])
        np.random.set_state(state[1])
        torch.set_rng_state(state[2])


def seed_draws(key: int) -> None:
    random.seed(key)
    np.random.seed(key % 2**32)
    torch.default_generator.manual_seed(key % 2**63)
