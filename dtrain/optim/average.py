"""A moving average of the weights (EMA), kept as optimizer state: saved, sharded and resumed like every other part."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from dtrain.util.dtensor import local

KEY = "ema"  # optim.NAME.ema in checkpoints


class WeightAverage:
    """After each update of the optimizer: average ← decay · average + (1 − decay) · weight. It begins at the weights.

    The state of the optimizer must exist: optimizers create theirs only where a weight has none.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, decay: float, weights: Iterable[Tensor]) -> None:
        self.optimizer, self.decay, self.is_inside = optimizer, decay, False
        for weight in weights:
            optimizer.state[weight][KEY] = weight.detach().clone()
        # not torch's hooks: a kernel's step_if does not call them, and a step in a step would call them twice
        optimizer.step = self.followed(optimizer.step)  # type: ignore[method-assign]
        if hasattr(optimizer, "step_if"):
            optimizer.step_if = self.followed_if(optimizer.step_if)

    def followed(self, step: Callable[..., Any]) -> Callable[..., Any]:
        def step_and_average(*arguments: Any, **named: Any) -> Any:
            result = step(*arguments, **named)
            if not self.is_inside:
                self.update()
            return result

        return step_and_average

    def followed_if(self, step_if: Callable[..., None]) -> Callable[..., None]:
        def step_and_average(finite: Tensor, factor: Tensor | None = None) -> None:
            self.is_inside = True
            step_if(finite, factor)
            self.is_inside = False
            self.update(finite)

        return step_and_average

    @torch.no_grad()
    def update(self, finite: Tensor | None = None) -> None:
        """Average, unless `finite` is false: then the step changed nothing. On a GPU there is no host sync."""
        held = [p for group in self.optimizer.param_groups for p in group["params"]]
        pairs = [
            (local(self.optimizer.state[p][KEY]), local(p)) for p in held if KEY in self.optimizer.state.get(p, {})
        ]
        if not pairs:
            return
        averages, weights = map(list, zip(*pairs, strict=True))
        steps = torch._foreach_sub(weights, averages)
        share = 1 - self.decay
        torch._foreach_mul_(steps, share if finite is None else finite.to(averages[0].device) * share)
        torch._foreach_add_(averages, steps)
