"""Bugs in dropout and its random numbers, and in the initial weights."""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch.distributed as dist
from torch import nn

from dtrain.commands.verify.mutations.registry import after, mutation, replace


def random_rank(choose: Callable[[], int]) -> None:
    from dtrain.strategies.base import Strategy

    after(Strategy, "setup", lambda self: setattr(self, "random_rank", choose()))


@mutation
def dropout_alike() -> None:
    random_rank(lambda: 0)


@mutation
def dropout_differs() -> None:
    random_rank(dist.get_rank)


@mutation
def dropout_each_step() -> None:
    from dtrain.train import process

    replace(process, "seed_everything", lambda usual: lambda seed, step, data_rank: usual(seed, 0, data_rank))


@mutation
def recompute_draws_anew() -> None:
    from dtrain.strategies import recompute

    replace(recompute, "recompute", lambda usual: functools.partial(usual, preserve_rng_state=False))


@mutation
def weights_by_rank() -> None:
    from dtrain.checkpoint.initial_weights import Drawn

    after(Drawn, "__init__", lambda self: setattr(self, "seed", self.seed + dist.get_rank()))


@mutation
def eval_drops() -> None:
    replace(nn.Module, "eval", lambda usual: lambda self: self)
