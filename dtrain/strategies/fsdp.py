"""Fully sharded data parallel (FSDP2): weights, gradients and optimizer state cut over the data ranks."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

from dtrain.strategies.base import Strategy


class FSDP(Strategy):
    def __init__(self, dp: int = -1, reshard_after_forward: bool = True) -> None:
        super().__init__(dp=dp)
        self.reshard_after_forward = reshard_after_forward

    def parallelize(self, model: nn.Module) -> None:
        if not hasattr(model, "fsdp_units"):
            raise ValueError(
                f"strategy=fsdp: {type(model).__name__} does not say what to gather at a time\n"
                "  fix: add fsdp_units() to the model (a list of its layers), or strategy=ddp"
            )
        if self.precision.dtype == torch.float32:
            policy = MixedPrecisionPolicy()
        else:
            # Weights are gathered in 16 bits, half the traffic; gradients are reduced in 32. What flows between layers
            # is left to autocast, as under ddp: products in 16 bits, norms and the residual stream in 32.
            policy = MixedPrecisionPolicy(self.precision.dtype, reduce_dtype=torch.float32, cast_forward_inputs=False)
        options: dict[str, Any] = {"mesh": self.mesh["dp"], "mp_policy": policy}
        for unit in model.fsdp_units():  # type: ignore[operator]
            if self.compile:  # block by block: the gathers between blocks cannot be part of a graph
                unit.compile()
            fully_shard(unit, reshard_after_forward=self.reshard_after_forward, **options)
        fully_shard(model, **options)

    def wrap(self, model: nn.Module) -> nn.Module:
        return model

    @contextlib.contextmanager
    def no_sync(self, last: bool) -> Iterator[None]:
        assert isinstance(self.model, FSDPModule)
        self.model.set_requires_gradient_sync(last)
        yield
