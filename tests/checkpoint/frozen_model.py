"""A model of dtrain with frozen embeddings, for runs whose checkpoints have something that stays the same."""

from __future__ import annotations

from typing import Any

from dtrain.models.llama import Llama


class FrozenEmbeddings(Llama):
    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        assert self.embed is not None
        self.embed.weight.requires_grad_(False)
