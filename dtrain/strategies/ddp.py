"""Data parallel: the whole model on every rank, gradients averaged while the backward pass runs."""

from __future__ import annotations

import contextlib
from typing import Any

from torch import nn
from torch.nn.parallel import DistributedDataParallel

from dtrain.strategies.base import Strategy


class DDP(Strategy):
    def __init__(self, dp: int = -1, bucket_mb: int = 25) -> None:
        super().__init__(dp=dp)
        self.bucket_mb = bucket_mb

    def wrap(self, model: nn.Module) -> nn.Module:
        if self.sizes.dp > 1:
            model = DistributedDataParallel(
                model,
                process_group=self.mesh["dp"].get_group(),
                bucket_cap_mb=self.bucket_mb,
                gradient_as_bucket_view=True,  # gradients live in the buckets: one copy of them less
            )
        return super().wrap(model)  # compiled outside DDP, so that torch cuts the graph at the buckets and overlaps

    def no_sync(self, last: bool) -> contextlib.AbstractContextManager[Any]:
        if last or not isinstance(self.model, DistributedDataParallel):
            return contextlib.nullcontext()
        return self.model.no_sync()
