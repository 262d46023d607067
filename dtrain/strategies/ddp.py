"""Data parallel: the whole model on every rank, gradients averaged while the backward pass runs."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Iterator
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from dtrain.comm import compress as compression
from dtrain.comm.compressor import Compressor
from dtrain.strategies import buckets
from dtrain.strategies.base import LateResult, StepResult, Strategy
from dtrain.strategies.compile import compile_model
from dtrain.util import late_dynamo
from dtrain.util.device_rates import synchronize
from dtrain.util.dtensor import Held

log = logging.getLogger("dtrain")


class DDP(Strategy):
    updates_together = True

    def __init__(
        self,
        dp: int = -1,
        bucket_mb: int | Literal["auto"] = 25,
        compress: Literal["none", "fp16", "bf16", "int8", "powersgd", "topk", "onebit"] = "none",
        compress_rank: int = 4,
        compress_ratio: float = 0.01,
        compress_warmup: int = 0,
        cp: int = 1,
        cp_kind: Literal["ring", "allgather", "ulysses"] = "ring",
    ) -> None:
        super().__init__(dp=dp, cp=cp, cp_kind=cp_kind)
        self.is_auto = bucket_mb == "auto"
        self.bucket_mb = buckets.DEFAULT_MB if bucket_mb == "auto" else bucket_mb
        self.choice: dict[str, Any] = {}  # of bucket_mb=auto: the size, why, and for which run
        self.compress, self.compress_warmup = compress, compress_warmup
        self.compress_rank, self.compress_ratio = compress_rank, compress_ratio
        self.tolerance = compression.TOLERANCES.get(compress, self.tolerance)
        self.settled = False

    def wrap(self, model: nn.Module) -> nn.Module:
        if self.compile == "blocks":
            compile_model(model, "blocks")
        if self.sizes.token_ranks > 1:
            self.compressor = self.make_compressor()
            model = self.with_buckets(model)
        if self.compile == "whole":  # outside DDP, so that torch splits the graph at the buckets and overlaps
            compile_model(model, "whole")
        return model

    def make_compressor(self) -> Compressor | None:
        """Return what averages the buckets; None: DDP's own all-reduce."""
        if self.compress == "none":
            return None
        # a group of its own: on CPUs a thread averages, beside collectives of the backward pass (SyncBatchNorm)
        group = dist.new_group(dist.get_process_group_ranks(self.data_group))
        assert isinstance(group, dist.ProcessGroup)
        return compression.make(
            self.compress, dict(self.module.named_parameters()), group, self.device,
            rank=self.compress_rank, ratio=self.compress_ratio, warmup=self.compress_warmup,
        )  # fmt: skip

    def with_buckets(self, model: nn.Module, is_first: bool = True) -> nn.Module:
        self.waits_for_gradients = True
        with late_dynamo.ddp_default():
            wrapped = DistributedDataParallel(
                model,
                process_group=self.data_group,
                bucket_cap_mb=self.bucket_mb,
                init_sync=is_first,  # broadcasts the weights
                gradient_as_bucket_view=True,  # gradients are views of the buckets: one copy of them less
            )
        if self.compressor is not None:
            compression.register_ddp_hook(wrapped, self.module, self.compressor)
        return wrapped

    def train_step(self, inputs: Tensor, targets: Tensor) -> StepResult | LateResult:
        if not self.settled and isinstance(self.model, DistributedDataParallel):
            # a full micro-batch: another shape would be compiled separately, and batch norm refuses one sample
            batch = inputs[: self.micro_batch_size], self.own_targets(targets[: self.micro_batch_size])
            if self.is_auto and not self.choice:
                self.choose_buckets(*batch)
            self.settle_buckets(*batch)
        return super().train_step(inputs, targets)

    def settle_buckets(self, inputs: Tensor, targets: Tensor) -> None:
        """Run one backward pass and discard its gradients, at the start of every process.

        DDP rebuilds its buckets after its first backward pass, and with three or more ranks the order in which an
        element is summed depends on its place in a bucket. Without this pass, the first step after a resume would round
        differently from the same step of an uninterrupted run.
        """
        with self.rehearsal():
            self.model.train()
            self.rehearse(inputs, targets)
        self.settled = True

    def rehearse(self, inputs: Tensor, targets: Tensor) -> None:
        with self.autocast():
            loss = self.model(inputs, targets, **self.context)
        loss.backward()
        self.check_gradients()

    def no_sync(self, last: bool) -> contextlib.AbstractContextManager[Any]:
        if last or not isinstance(self.model, DistributedDataParallel):
            return contextlib.nullcontext()
        return self.model.no_sync()

    def choose_buckets(self, inputs: Tensor, targets: Tensor) -> None:
        """For bucket_mb=auto, at the start of a run: time passes with several sizes and keep the fastest."""
        if self.compile == "whole":
            why = "torch splits the compiled graph at the buckets, so every size would compile again"
            log.info("strategy.bucket_mb=auto: %d, the default: %s", self.bucket_mb, why)
            self.choice = {"bucket_mb": self.bucket_mb, "reason": why, "for": self.measured_for()}
            return
        num_bytes = sum(p.numel() * p.element_size() for p in self.module.parameters() if p.requires_grad)
        began = time.perf_counter()

        def visit(mb: int) -> list[float]:
            self.use_buckets(mb)
            self.timed_pass(inputs, targets)  # DDP rebuilds its buckets after its first pass
            times = [self.timed_pass(inputs, targets)]
            while sum(times) + times[-1] < buckets.VISIT_S and len(times) < buckets.MOST_PASSES:
                times.append(self.timed_pass(inputs, targets))
            return times

        with self.rehearsal(), self.without_warmup():
            self.model.train()
            best, passes = buckets.best_of(buckets.measure(buckets.sizes_to_try(num_bytes), visit))
        self.use_buckets(best)
        self.choice = {"bucket_mb": best, "pass_ms": passes, "for": self.measured_for()}
        log.info("%s, measured for %.1f s", buckets.reason(self.choice), time.perf_counter() - began)

    @contextlib.contextmanager
    def without_warmup(self) -> Iterator[None]:
        """Measure what most steps send, and not what the first ones of strategy.compress_warmup do."""
        if self.compressor is not None:
            self.compressor.warmup = 0
        yield
        if self.compressor is not None:
            self.compressor.warmup = self.compress_warmup

    def use_buckets(self, mb: int) -> None:
        """Wrap the module again with buckets of this size. The old wrapper goes first: its hooks would communicate."""
        self.optimizer.zero_grad(set_to_none=True)  # gradients are views of the old buckets
        self.model, self.bucket_mb = self.module, mb
        self.model = self.with_buckets(self.module, is_first=False)

    def timed_pass(self, inputs: Tensor, targets: Tensor) -> float:
        """Seconds of a forward and backward pass on the slowest rank: the same number on all ranks."""
        synchronize(self.device)
        began = time.perf_counter()
        self.rehearse(inputs, targets)
        synchronize(self.device)
        seconds = torch.tensor([time.perf_counter() - began], dtype=torch.float64, device=self.device)
        self.optimizer.zero_grad(set_to_none=True)
        dist.all_reduce(seconds, dist.ReduceOp.MAX, group=self.data_group)
        return float(seconds)

    def measured_for(self) -> dict[str, Any]:
        """What must be alike for a resume to keep the choice, and with it the order of summation."""
        sent = [self.compress, self.compress_rank, self.compress_ratio]
        ranks = self.sizes.token_ranks
        alike = {"data_ranks": ranks, "micro_batch_size": self.micro_batch_size, "compile": self.compile}
        return alike | ({} if self.compress == "none" else {"compress": sent})

    def totals(self) -> dict[str, Any]:
        return {"buckets": self.choice} if self.choice else {}

    def extra(self, counts: dict[str, dict[str, float]]) -> dict[str, Any]:
        return super().extra(counts) | self.totals()

    def load_state_dict(self, state: dict[str, Held], extra: dict[str, Any]) -> None:
        super().load_state_dict(state, extra)
        saved = extra.get("buckets", {})
        if self.is_auto and not self.choice and saved.get("for") == self.measured_for():
            self.choice = saved
            if isinstance(self.model, DistributedDataParallel) and saved["bucket_mb"] != self.bucket_mb:
                self.use_buckets(saved["bucket_mb"])
            log.info("strategy.bucket_mb=auto: %d, as before the resume", self.bucket_mb)
