"""A model split into pipeline stages: their layers, a rank's stages as one module, weights tied across stages."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from dtrain.strategies.stage_layout import balance
from dtrain.util.collective import wait_for_peers
from dtrain.util.dtensor import local


def split_points(model: nn.Module, num_stages: int, split: list[int] | None) -> list[tuple[int, int]]:
    """Return each stage's layers: as requested, or such that the largest stage has the fewest parameters."""
    layers = [num_parameters(unit) for unit in model.fsdp_units()]  # type: ignore[operator]
    if split is not None:
        return list(pairwise([0, *split, len(layers)]))
    if num_stages == 1:
        return [(0, len(layers))]
    first = num_parameters(stage_of(model, 0, 1)) - layers[0]  # embeddings
    last = num_parameters(stage_of(model, len(layers) - 1, len(layers))) - layers[-1]  # norm and head
    return balance(layers, first, last, num_stages)


def stage_of(model: nn.Module, low: int, high: int) -> nn.Module:
    copied = copy.deepcopy(model)
    stage: nn.Module | None = copied.pipeline_split(low, high)  # type: ignore[operator]
    return copied if stage is None else stage  # it may delete in place


def num_parameters(module: nn.Module) -> int:
    return sum(p.numel() for p in module.parameters())


class Stages(nn.ModuleList):
    """A rank's stages as one module, whose weights keep their canonical names."""

    def named_parameters(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Parameter]]:
        for stage in self:
            yield from stage.named_parameters(*args, **kwargs)

    def named_buffers(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, Tensor]]:
        for stage in self:
            yield from stage.named_buffers(*args, **kwargs)

    def init_weights(self, name: str, weight: Tensor, generator: torch.Generator) -> None:
        self[0].init_weights(name, weight, generator)  # type: ignore[operator]


class TiedWeights:
    """Weights that are on two stages under one name: one weight with one gradient, counted once in the norm."""

    def __init__(self, module: nn.Module, rank: int, num_ranks: int, group: dist.ProcessGroup) -> None:
        self.module, self.rank, self.group = module, rank, group
        names: list[Any] = [None] * num_ranks
        dist.all_gather_object(names, [name for name, _ in module.named_parameters()], group=group)
        copies = Counter(name for held in names for name in held)
        # name → the pipeline ranks that have it; both copies may be on one rank
        self.holders = {n: [r for r, held in enumerate(names) if n in held] for n, count in copies.items() if count > 1}
        for name, holders in self.holders.items():
            if len(holders) > 2:
                raise ValueError(
                    f"strategy.pp={num_ranks}: {name} is on {len(holders)} ranks, and only two can share a weight\n"
                    "  fix: keep it on two stages in pipeline_split(), or a smaller strategy.pp"
                )

    def copies(self, name: str) -> list[nn.Parameter]:
        return [p for n, p in self.module.named_parameters() if n == name]

    def sum_gradients(self) -> None:
        """Give all copies the sum of their gradients, with the same bits."""
        for name, holders in self.holders.items():
            copies = self.copies(name)
            if not copies or copies[0].grad is None:  # on other ranks, or frozen
                continue
            total, *others = [local(p.grad) for p in copies if p.grad is not None]
            for gradient in others:
                total += gradient
            if len(holders) == 2:
                peer, received = holders[holders[0] == self.rank], torch.empty_like(total)
                swap = [dist.P2POp(dist.isend, total, group=self.group, group_peer=peer),
                        dist.P2POp(dist.irecv, received, group=self.group, group_peer=peer)]  # fmt: skip
                wait_for_peers(dist.batch_isend_irecv(swap))
                total += received
            for gradient in others:
                gradient.copy_(total)

    def counted_elsewhere(self) -> set[int]:
        """Return the ids of the copies on this rank that are not the first copy of their weight."""
        return {
            id(p) for name, holders in self.holders.items() for i, p in enumerate(self.copies(name))
            if i > 0 or holders[0] != self.rank
        }  # fmt: skip

    def copy_state(self, optimizer: torch.optim.Optimizer) -> None:
        """A checkpoint fills only the last of two copies on this rank: copy it to the other."""
        for name in self.holders:
            *others, filled = self.copies(name) or [nn.Parameter()]
            for p in others:
                local(p.detach()).copy_(local(filled.detach()))
                for key, value in optimizer.state.get(filled, {}).items():  # none if frozen
                    if isinstance(value, Tensor):
                        local(optimizer.state[p][key]).copy_(local(value))
