"""Bugs in what a resumed run continues with: its data and its optimizer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch.distributed as dist

from dtrain.commands.verify.mutations.registry import after, mutation, replace


def resumed_at(position: Callable[[int, int], int]) -> None:
    """Let a resumed run begin at `position(samples, batch size)`."""
    from dtrain.train import setup

    def make(usual: Any) -> Any:
        def load_newest(saver: Any, cfg: Any, *more: Any) -> Any:
            path, step, samples, spikes = usual(saver, cfg, *more)
            return path, step, position(samples, cfg.train.global_batch_size), spikes

        return load_newest

    replace(setup, "load_newest", make)


@mutation
def batch_skipped() -> None:
    resumed_at(lambda samples, batch_size: samples + batch_size)


@mutation
def data_restarts() -> None:
    resumed_at(lambda samples, batch_size: 0)


@mutation
def rank_data_dropped() -> None:
    from dtrain.data.loader import Loader

    def make(usual: Any) -> Any:
        def request(self: Any, position: int) -> Any:
            is_last = self.shuffle and dist.get_rank() == dist.get_world_size() - 1
            return usual(self, position + self.global_batch_size * is_last)

        return request

    replace(Loader, "request", make)


@mutation
def moments_lost() -> None:
    from dtrain.strategies.base import Strategy

    def more(self: Any) -> None:
        for slots in self.optimizer.state.values():
            for value in slots.values():
                if value.dim():
                    value.zero_()

    after(Strategy, "load_state_dict", more)


@mutation
def updates_from_zero() -> None:
    from dtrain.strategies.base import Strategy

    after(Strategy, "load_state_dict", lambda self: [slots["step"].zero_() for slots in self.optimizer.state.values()])


@mutation
def masters_not_loaded() -> None:
    from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer

    from dtrain.strategies.deepspeed import Zero

    def make(usual: Any) -> Any:
        def load_state_dict(self: Any, *arguments: Any) -> None:
            update = DeepSpeedZeroOptimizer.update_lp_params
            DeepSpeedZeroOptimizer.update_lp_params = lambda self: None
            usual(self, *arguments)
            DeepSpeedZeroOptimizer.update_lp_params = update

        return load_state_dict

    replace(Zero, "load_state_dict", make)
