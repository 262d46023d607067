"""Lion (Chen et al., 2023): the update is the sign of an average of momentum and gradient."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from dtrain.util.dtensor import local


class Lion(torch.optim.Optimizer):
    """Decoupled weight decay, one moment. Elementwise, so a shard of a weight is updated as the whole one would be."""

    def __init__(
        self, params: Any, lr: float = 1e-4, betas: tuple[float, float] = (0.9, 0.99), weight_decay: float = 0.0
    ) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        loss = None if closure is None else torch.enable_grad()(closure)()
        for group in self.param_groups:
            lr, (weight, decay) = group["lr"], group["betas"]
            moved = [p for p in group["params"] if p.grad is not None]
            if not moved:
                continue
            for p in moved:
                if not self.state[p]:
                    self.state[p]["exp_avg"] = torch.zeros_like(p)
            parameters = [local(p) for p in moved]
            gradients = [local(p.grad) for p in moved]
            momenta = [local(self.state[p]["exp_avg"]) for p in moved]
            updates = torch._foreach_lerp(momenta, gradients, 1 - weight)
            torch._foreach_sign_(updates)
            torch._foreach_mul_(parameters, 1 - lr * group["weight_decay"])
            torch._foreach_add_(parameters, updates, alpha=-lr)
            torch._foreach_lerp_(momenta, gradients, 1 - decay)
        return loss
