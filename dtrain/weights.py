"""A run's first weights, by canonical name: the same under every strategy and world size."""

from __future__ import annotations

import hashlib

import torch
from torch import nn

from dtrain.shards import Held, chunks_of


class Drawn:
    """Every weight and buffer has the value that (seed, name) says.

    Each is drawn whole, one at a time, and each rank keeps its shard; so no rank ever holds the whole model. The draws
    of a CPU and of a GPU differ, so `device` does them also for weights that are offloaded.
    """

    def __init__(self, seed: int) -> None:
        self.seed = seed

    @torch.no_grad()
    def fill(self, model: nn.Module, name: str, held: Held, device: torch.device) -> None:
        chunks = chunks_of(held)
        if not chunks:
            return
        digest = hashlib.sha256(f"{self.seed}/{name}".encode()).digest()
        generator = torch.Generator(device).manual_seed(int.from_bytes(digest[:7]))
        whole = torch.empty(chunks[0].whole_shape, dtype=chunks[0].values.dtype, device=device)
        model.init_weights(name, whole, generator)  # type: ignore[operator]
        for chunk in chunks:
            chunk.values.copy_(whole[chunk.box])
