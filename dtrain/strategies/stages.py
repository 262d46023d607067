"""A model cut into pipeline stages: which layers each has, and the stages of a rank as one module."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from dtrain.strategies.rules import balance


def split_points(model: nn.Module, num_stages: int, split: list[int] | None) -> list[tuple[int, int]]:
    """Which layers each stage has: as asked for, or such that the largest stage has the fewest parameters."""
    layers = [num_parameters(unit) for unit in model.fsdp_units()]  # type: ignore[operator]
    if split is not None:
        return list(pairwise([0, *split, len(layers)]))
    if num_stages == 1:
        return [(0, len(layers))]
    first = num_parameters(stage_of(model, 0, 1)) - layers[0]  # embeddings
    last = num_parameters(stage_of(model, len(layers) - 1, len(layers))) - layers[-1]  # norm and head
    return balance(layers, first, last, num_stages)


def stage_of(model: nn.Module, low: int, high: int) -> nn.Module:
    stage: nn.Module = copy.deepcopy(model).pipeline_split(low, high)  # type: ignore[operator]
    return stage


def num_parameters(module: nn.Module) -> int:
    return sum(p.numel() for p in module.parameters())


class Stages(nn.ModuleList):
    """The stages of a rank as one module, whose weights have their canonical names."""

    def named_parameters(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Parameter]]:
        for stage in self:
            yield from stage.named_parameters(*args, **kwargs)

    def named_buffers(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, Tensor]]:
        for stage in self:
            yield from stage.named_buffers(*args, **kwargs)

    def init_weights(self, name: str, weight: Tensor, generator: torch.Generator) -> None:
        self[0].init_weights(name, weight, generator)  # type: ignore[operator]
