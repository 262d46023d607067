"""Turn a model on the meta device into weights in memory with their initial values."""

from __future__ import annotations

from collections import defaultdict
from typing import Protocol

import torch
from torch import nn

from dtrain.util.dtensor import Held


def materialize(model: nn.Module, device: torch.device) -> None:
    """Allocate a meta-device model. Refuse tied weights: one tensor under two names would become two tensors."""
    names: dict[int, list[str]] = defaultdict(list)
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names[id(parameter)].append(name)
    for tied in names.values():
        if len(tied) > 1:
            raise ValueError(
                f"model: {' and '.join(tied)} are one weight under two names, which the meta device unties\n"
                f"  fix: keep {tied[0]} only, and use it in both places of forward()"
            )
    model.to_empty(device=device)


def set_stream(model: nn.Module, dtype: torch.dtype) -> None:
    """Set the dtype of the residual stream in a model that has one."""
    if isinstance(getattr(model, "stream", None), torch.dtype):
        model.stream = dtype  # type: ignore[assignment]


class Source(Protocol):
    """Where initial weights come from."""

    def fill(self, model: nn.Module, name: str, held: Held, device: torch.device) -> None: ...


def init_weights(model: nn.Module, first: Source, device: torch.device | None = None) -> None:
    """Fill every weight and buffer with its initial value."""
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        first.fill(model, name, tensor, device or tensor.device)
