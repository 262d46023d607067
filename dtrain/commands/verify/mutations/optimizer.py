"""Bugs in weight decay and the learning rate schedule."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist

from dtrain.commands.verify.mutations.registry import mutation, replace


@mutation
def norms_decay() -> None:
    from dtrain.optim import build

    def make(usual: Any) -> Any:
        def grouped(named_parameters: Any, weight_decay: float, *more: Any, **named: Any) -> Any:
            groups, fused = usual(named_parameters, weight_decay, *more, **named)
            return [group | {"weight_decay": weight_decay} for group in groups], fused

        return grouped

    replace(build, "grouped", make)


@mutation
def schedule_by_world() -> None:
    from dtrain.train import loop

    ranks: Any = loop

    def make(usual: Any) -> Any:
        def set_up(*arguments: Any) -> Any:
            run = usual(*arguments)
            schedule = run.schedule
            run.schedule = lambda step: schedule(step * dist.get_world_size())
            return run

        return set_up

    replace(ranks, "set_up", make)
