"""Bugs in pipelines, with tied weights, and in tensor parallel."""

from __future__ import annotations

import functools
import types
from typing import Any

import torch
from torch import Tensor, nn

from dtrain.commands.verify.mutations.registry import MUTATIONS, mutation, replace


@mutation
def tied_weight_twice() -> None:
    from dtrain.strategies.pipeline_stages import TiedWeights

    replace(TiedWeights, "counted_elsewhere", lambda usual: lambda self: set())


@mutation
def tied_gradient_alone() -> None:
    from dtrain.strategies.pipeline_stages import TiedWeights

    replace(TiedWeights, "sum_gradients", lambda usual: lambda self: None)


@mutation
def other_targets() -> None:
    from dtrain.strategies.pipeline import Pipeline

    def make(usual: Any) -> Any:
        return lambda self, inputs, targets, train: usual(self, inputs, targets.roll(self.micro_batch_size, 0), train)

    replace(Pipeline, "run", make)


@mutation
def passes_divided_twice() -> None:
    from dtrain.strategies import pipeline

    for name, schedule in list(pipeline.SCHEDULES.items()):
        pipeline.SCHEDULES[name] = functools.partial(
            lambda kind, *arguments, **named: kind(*arguments, **named | {"scale_grads": True}), schedule
        )


@mutation
def stale_stage() -> None:
    from dtrain.strategies.pipeline import Pipeline

    def make(usual: Any) -> Any:
        def update(self: Any, loss: Tensor) -> Any:
            if self.pp_rank == 1:
                now = {p: p.grad for p in self.module.parameters()}
                before = getattr(self, "before", {p: torch.zeros_like(p) for p in now})
                for p, gradient in before.items():
                    p.grad = gradient
                self.before = now
            return usual(self, loss)

        return update

    replace(Pipeline, "update", make)


@mutation
def norm_weights_not_reduced() -> None:
    from torch.distributed.tensor import DTensor

    from dtrain.strategies import tensor
    from dtrain.util.dtensor import is_dtensor

    def finish_sums(model: nn.Module) -> None:
        """Call a partial sum the whole one."""
        for p in (p for p in model.parameters() if is_dtensor(p) and p.grad is not None):
            gradient: Any = p.grad
            if any(placement.is_partial() for placement in gradient.placements):
                p.grad = DTensor.from_local(
                    gradient.to_local(),
                    p.device_mesh,  # type: ignore[attr-defined]
                    p.placements,  # type: ignore[attr-defined]
                    run_check=False,
                )

    replace(tensor, "finish_sums", lambda usual: finish_sums)


MUTATIONS["adapters-not-reduced"] = norm_weights_not_reduced


@mutation
def vocabulary_max() -> None:
    from torch.distributed.tensor.parallel import loss as module

    loss: Any = module
    ours: Any = types.SimpleNamespace(**vars(loss.funcol))
    usual = ours.all_reduce
    ours.all_reduce = lambda x, reduceOp, group: x if reduceOp == "MAX" else usual(x, reduceOp, group)
    loss.funcol = ours
