"""Turn a model on the meta device into weights in memory with their initial values."""

from __future__ import annotations

import contextlib
from collections import defaultdict
from collections.abc import Iterator
from typing import Protocol

import torch
from torch import nn

from dtrain.util.dtensor import Held


def materialize(model: nn.Module, device: torch.device) -> None:
    """Allocate a meta-device model."""
    with tied_once(model):
        model._apply(lambda tensor: empty_like(tensor, device))


def ties(model: nn.Module) -> list[list[tuple[nn.Module, str]]]:
    """Return the places (module, attribute) of each weight that has several names; the first is the canonical one."""
    places: dict[int, list[tuple[nn.Module, str]]] = defaultdict(list)
    for module in model.modules():
        for name, p in module._parameters.items():
            if p is not None:
                places[id(p)].append((module, name))
    return [found for found in places.values() if len(found) > 1]


@contextlib.contextmanager
def tied_once(model: nn.Module) -> Iterator[None]:
    """Within the context a tied weight has only its canonical name: torch would move it once for each name, and so
    make several weights of one. Afterwards the other names are the same weight again."""
    found = ties(model)
    for _, *others in found:
        for module, name in others:
            module._parameters[name] = None
    yield
    for (first, canonical), *others in found:
        for module, name in others:
            module._parameters[name] = first._parameters[canonical]


def empty_like(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """torch.empty_like; of a plain meta tensor without torch's Python implementation, which imports sympy."""
    if type(tensor) in (torch.Tensor, nn.Parameter) and tensor.is_meta and tensor.is_contiguous():
        return torch.empty(tensor.shape, dtype=tensor.dtype, device=device)
    return torch.empty_like(tensor, device=device)


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
