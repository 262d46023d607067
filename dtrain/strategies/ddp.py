"""Data parallel: the whole model on every rank, gradients averaged while the backward pass runs."""

from __future__ import annotations

import contextlib
from typing import Any

from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from dtrain.strategies.base import LateResult, StepResult, Strategy
from dtrain.strategies.compile import compile_model


class DDP(Strategy):
    def __init__(self, dp: int = -1, bucket_mb: int = 25) -> None:
        super().__init__(dp=dp)
        self.bucket_mb = bucket_mb
        self.settled = False

    def wrap(self, model: nn.Module) -> nn.Module:
        if self.compile == "blocks":
            compile_model(model, "blocks")
        if self.sizes.dp > 1:
            model = DistributedDataParallel(
                model,
                process_group=self.data_group,
                bucket_cap_mb=self.bucket_mb,
                gradient_as_bucket_view=True,  # gradients are views of the buckets: one copy of them less
            )
        if self.compile == "whole":  # outside DDP, so that torch splits the graph at the buckets and overlaps
            compile_model(model, "whole")
        return model

    def train_step(self, inputs: Tensor, targets: Tensor) -> StepResult | LateResult:
        if not self.settled and isinstance(self.model, DistributedDataParallel):
            # a full micro-batch: another shape would be compiled separately, and batch norm refuses one sample
            self.settle_buckets(inputs[: self.micro_batch_size], targets[: self.micro_batch_size])
        return super().train_step(inputs, targets)

    def settle_buckets(self, inputs: Tensor, targets: Tensor) -> None:
        """Run one backward pass and discard its gradients, at the start of every process.

        DDP rebuilds its buckets after its first backward pass, and with three or more ranks the order in which an
        element is summed depends on its place in a bucket. Without this pass, the first step after a resume would round
        differently from the same step of an uninterrupted run.
        """
        with self.rehearsal(), self.autocast():
            self.model.train()
            self.model(inputs, targets).backward()
        self.settled = True

    def no_sync(self, last: bool) -> contextlib.AbstractContextManager[Any]:
        if last or not isinstance(self.model, DistributedDataParallel):
            return contextlib.nullcontext()
        return self.model.no_sync()
