"""The state of a new optimizer, for a rollback to the checkpoint that a fork with another optimizer began with.

That checkpoint has the state of the old optimizer, which the run does not use. Without this copy, a rollback would keep
the moments of the steps that it undoes. Most optimizers start with zeros, of which no copy is needed.
"""

from __future__ import annotations

import copy
from typing import Any

from torch import Tensor

from dtrain.strategies.base import Strategy
from dtrain.util.dtensor import chunks_of


class FreshState:
    """`keeps`: whether the run may roll back (train.spike=rollback). What does not start with zeros is copied."""

    def __init__(self, keeps: bool) -> None:
        self.keeps = keeps
        self.tensors: dict[str, list[Tensor | None]] | None = None
        self.extra: dict[str, Any] = {}

    def extra_of(self, strategy: Strategy, state: dict[str, Any]) -> dict[str, Any]:
        """Return the strategy's extra state at its start; at a rollback, also restore the tensors that are no weights.

        All ranks must call it. It changes `state` in place, before the weights are loaded.
        """
        own = {name: chunks_of(held) for name, held in state.items() if not name.startswith("model.")}
        if self.tensors is None:
            extra = strategy.extra_state()
            if self.keeps:
                self.extra = copy.deepcopy(extra)
                self.tensors = {name: [kept(chunk.values) for chunk in chunks] for name, chunks in own.items()}
            return extra
        for name, chunks in own.items():
            for chunk, first in zip(chunks, self.tensors[name], strict=True):
                chunk.values.zero_() if first is None else chunk.values.copy_(first)
        return copy.deepcopy(self.extra)


def kept(values: Tensor) -> Tensor | None:
    """Return a copy; None: all are zero."""
    return values.to("cpu", copy=True) if values.any() else None
