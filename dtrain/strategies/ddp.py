"""Data parallel: the whole model on every rank, gradients averaged while the backward pass runs."""

from __future__ import annotations

import contextlib
from typing import Any, Literal

import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from dtrain.comm import compress as compression
from dtrain.strategies.base import LateResult, StepResult, Strategy
from dtrain.strategies.compile import compile_model


class DDP(Strategy):
    def __init__(
        self,
        dp: int = -1,
        bucket_mb: int = 25,
        compress: Literal["none", "fp16", "bf16", "int8", "powersgd", "topk", "onebit"] = "none",
        compress_rank: int = 4,
        compress_ratio: float = 0.01,
        compress_warmup: int = 0,
    ) -> None:
        super().__init__(dp=dp)
        self.bucket_mb = bucket_mb
        self.compress, self.compress_warmup = compress, compress_warmup
        self.compress_rank, self.compress_ratio = compress_rank, compress_ratio
        self.tolerance = compression.TOLERANCES.get(compress)
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
            if self.compress != "none":
                self.compress_gradients(model)
        if self.compile == "whole":  # outside DDP, so that torch splits the graph at the buckets and overlaps
            compile_model(model, "whole")
        return model

    def compress_gradients(self, model: DistributedDataParallel) -> None:
        # a group of its own: on CPUs a thread averages, beside collectives of the backward pass (SyncBatchNorm)
        group = dist.new_group(dist.get_process_group_ranks(self.data_group))
        assert isinstance(group, dist.ProcessGroup)
        self.compressor = compression.make(
            self.compress, dict(self.module.named_parameters()), group, self.device,
            rank=self.compress_rank, ratio=self.compress_ratio, warmup=self.compress_warmup,
        )  # fmt: skip
        compression.register_ddp_hook(model, self.module, self.compressor)

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
