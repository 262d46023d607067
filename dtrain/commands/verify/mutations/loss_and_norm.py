"""Bugs in the mean loss over uneven samples, and in the gradient norm and clipping."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from dtrain.commands.verify.mutations.registry import MUTATIONS, mutation, replace


@mutation
def mean_of_pass_means() -> None:
    from dtrain.strategies.base import Strategy

    replace(Strategy, "weight", lambda usual: lambda self, targets: 1.0)


MUTATIONS["mean-of-pass-means-pipeline"] = mean_of_pass_means


@mutation
def mean_of_rank_means() -> None:
    from dtrain.models.layers import IGNORED
    from dtrain.strategies.base import Strategy

    def count_targets(self: Any, targets: Tensor) -> None:
        self.mean_count = (targets != IGNORED).sum().float() * self.micro_batch_size / len(targets)

    replace(Strategy, "count_targets", lambda usual: count_targets)


@mutation
def norm_times_world() -> None:
    from dtrain.strategies.base import Strategy

    replace(Strategy, "norm", lambda usual: lambda self, parameters: usual(self, parameters) * dist.get_world_size())


@mutation
def local_norm() -> None:
    from dtrain.strategies.base import Strategy
    from dtrain.strategies.grad_norm import norm_of
    from dtrain.util.dtensor import local

    def norm(self: Any, parameters: list[nn.Parameter]) -> Tensor:
        return norm_of([local(p.grad) for p in parameters if p.grad is not None])

    replace(Strategy, "norm", lambda usual: norm)


@mutation
def copies_in_norm() -> None:
    from dtrain.strategies import grad_norm

    replace(grad_norm, "_num_shards", lambda usual: lambda gradient: dist.get_world_size())


@mutation
def clip_before_unscale() -> None:
    from dtrain.strategies.base import Strategy

    def make(usual: Any) -> Any:
        def clip(self: Any, parameters: list[nn.Parameter]) -> Tensor:
            gradients = [p.grad for p in parameters if p.grad is not None]
            torch._foreach_mul_(gradients, self.precision.scale)
            norm: Tensor = usual(self, parameters)
            torch._foreach_mul_(gradients, 1 / self.precision.scale)
            return norm

        return clip

    replace(Strategy, "clip", make)
