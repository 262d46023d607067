"""Parameter server: each rank owns some weights and their optimizer state, and all ranks send it their gradients.

sync has the maths of ddp. Under async and bounded, each micro-batch is an update of its own, with 1/m of the learning
rate if a step has m of them: so a step moves the weights about as far as under sync. Every rank reads the whole batch
of a step and takes micro-batches of it from a shared counter, until none is left. Then it continues with the next step
and does not wait for the others. So each sample is used once, and a slow rank takes fewer. The gradient of an update
was computed with weights that other updates have changed since: their number is its staleness. Which rank computes what
depends on timing, so two runs differ.
"""

from __future__ import annotations

import functools
import math
import time
from collections.abc import Callable, Iterable
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn

from dtrain.comm.parameter_server import Server, Worker, copy_from_owners, owners, sum_at_owners
from dtrain.strategies.base import LateResult, StepResult, Strategy
from dtrain.strategies.grad_norm import norm_of
from dtrain.util.collective import gather
from dtrain.util.dtensor import Held

MakeOptimizer = Callable[[Iterable[tuple[str, nn.Parameter]]], torch.optim.Optimizer]
STEPS_AHEAD = 8  # of the slowest rank; a stop takes effect so many steps after its request


class ParameterServer(Strategy):
    updates_all = False  # each rank's optimizer has the weights that it serves

    def __init__(
        self,
        dp: int = -1,
        mode: Literal["sync", "async", "bounded"] = "sync",
        staleness: int | None = None,
        slow_rank: int | None = None,
        slow_factor: float = 5,
    ) -> None:
        super().__init__(dp=dp)
        self.mode, self.staleness, self.slow_rank, self.slow_factor = mode, staleness, slow_rank, slow_factor
        self.meets = mode == "sync"
        if not self.meets:
            # In 20 steps in which one process learns 0.7, with updates of a sample, losses were up to 0.16 higher at 1
            # rank (staleness 0), 0.17 at 2 and 0.19 at 4 (staleness 4). Most of it is not from old gradients: AdamW
            # learns less from eight updates of a sample each than from one of all eight.
            self.tolerance, self.steps_ahead = 0.25, STEPS_AHEAD
        self.steps, self.settled = 0, False
        self.last = (math.nan, math.nan)  # loss and norm that were known at the last step

    def setup(self, model: nn.Module, make_optimizer: MakeOptimizer, **options: Any) -> None:
        super().setup(model, functools.partial(self.shard, make_optimizer), **options)
        if not self.meets:
            mine = [self.updated(p) for p in self.shards[dist.get_rank()]]
            self.worker = Worker(self.shards, Server(mine, self.optimizer, self.staleness))
            self.data_rank, self.data_ranks = 0, 1  # every rank reads the whole batch

    def shard(self, make_optimizer: MakeOptimizer, named: Iterable[tuple[str, nn.Parameter]]) -> torch.optim.Optimizer:
        """Divide the weights among the ranks, and return the optimizer of those that this rank owns."""
        named = list(named)
        trained = {name: p for name, p in named if p.requires_grad}
        owner = owners({name: p.numel() for name, p in trained.items()}, self.sizes.dp)
        self.shards = [[p for name, p in trained.items() if owner[name] == r] for r in range(self.sizes.dp)]
        mine = set(self.shards[dist.get_rank()])
        # the server updates at any time, so it needs other tensors than the ones that this rank computes with
        self.served = {} if self.meets else {p: nn.Parameter(p.detach().clone()) for p in mine}
        optimizer = make_optimizer(named)
        for group in optimizer.param_groups:
            group["params"] = [self.updated(p) for p in group["params"] if p in mine]
        if self.meets:
            optimizer.zero_grad = self.module.zero_grad  # type: ignore[method-assign]  # other ranks' weights, too
        return optimizer

    def updated(self, p: nn.Parameter) -> nn.Parameter:
        return self.served.get(p, p)

    def in_step(self) -> bool:
        return self.meets

    def set_lr(self, share: float) -> float:
        self.lr_share = share
        if self.meets:
            return super().set_lr(share)
        return float(self.optimizer.param_groups[0]["peak_lr"]) * share  # an update gets its rate with its gradient

    def forward_backward(self, inputs: Tensor, targets: Tensor) -> Tensor:
        began = time.perf_counter()
        loss = super().forward_backward(inputs, targets)
        if self.slow_rank == dist.get_rank():
            time.sleep((self.slow_factor - 1) * (time.perf_counter() - began))
        return loss

    # ---- sync ------------------------------------------------------------------------------------------------

    def update(self, loss: Tensor) -> StepResult | LateResult:
        if self.sizes.dp > 1:
            sum_at_owners(self.shards)
            for p in self.shards[dist.get_rank()]:  # none if there are more ranks than weights
                if p.grad is not None:
                    p.grad /= self.sizes.dp
        result = super().update(loss).read()
        if self.sizes.dp > 1 and result.updated:
            copy_from_owners(self.shards)
        return result

    def clip(self, parameters: list[nn.Parameter]) -> Tensor:
        """Clip by one norm: of all weights under async, where a rank has all gradients; under sync over the owners."""
        if not self.meets or self.sizes.dp == 1:
            return super().clip(parameters)
        square = norm_of([p.grad for p in parameters if p.grad is not None]).square().to(self.device)
        dist.all_reduce(square, group=self.data_group)
        norm = square.sqrt()
        if self.max_grad_norm is not None:
            nn.utils.clip_grads_with_norm_(parameters, self.max_grad_norm, norm)
        return norm

    # ---- async and bounded -----------------------------------------------------------------------------------

    def train_step(self, inputs: Tensor, targets: Tensor) -> StepResult | LateResult:
        if self.meets:
            return super().train_step(inputs, targets)
        self.model.train()
        self.steps, self.settled = self.steps + 1, False
        self.worker.server.accepts.set()
        if self.masked:
            self.mean_count = self.num_targets(targets).float() * self.micro_batch_size / len(targets)
        parts = [t.split(self.micro_batch_size) for t in (inputs, targets)]
        count = len(parts[0])
        all_finite = True
        piece = self.worker.take(self.steps, count)
        while piece is not None:
            self.worker.pull()
            loss = float(self.forward_backward(parts[0][piece], parts[1][piece]))
            norm = float(self.clip([p for p in self.module.parameters() if p.grad is not None]))
            finite = math.isfinite(loss) and math.isfinite(norm)
            if finite:
                self.worker.push(self.lr_share / count)
            all_finite &= finite
            self.last = (loss, norm)
            self.module.zero_grad()
            piece = self.worker.take(self.steps, count, loss, norm)
        return self.known_result(all_finite)

    def known_result(self, all_finite: bool) -> StepResult:
        """Rank 0 reports the mean of what was finished since its last step, on any rank; the others their last piece.

        Pieces of this step that other ranks still work on count for a later one.
        """
        if self.worker.server.pieces and (found := self.worker.server.pieces.new_results()):
            all_finite = all(math.isfinite(value) for result in found for value in result)
            loss, norm = zip(*found, strict=True)
            self.last = (sum(loss) / len(found), sum(norm) / len(found))
        return StepResult(*self.last, updated=all_finite)

    def settle(self) -> None:
        """Wait until all ranks have pushed what they computed, and give all of them the same weights."""
        if self.meets or self.settled:
            return
        dist.barrier()
        self.worker.pull()
        self.worker.server.accepts.clear()  # what is saved must not change before this rank trains on
        dist.barrier()
        self.settled = True

    def eval_step(self, inputs: Tensor, targets: Tensor) -> Tensor:
        if not self.meets:
            self.settle()
            inputs, targets = (t.tensor_split(self.sizes.dp)[dist.get_rank()] for t in (inputs, targets))
        return super().eval_step(inputs, targets)

    def eval_outputs(self, inputs: Tensor, targets: Tensor, see: Callable[[Tensor, Tensor], None]) -> None:
        self.settle()  # without a share of its own, each rank sees the whole batch
        super().eval_outputs(inputs, targets, see)

    def state_dict(self) -> dict[str, Held]:
        self.settle()
        return super().state_dict()

    def extra_state(self) -> dict[str, Any]:
        self.settle()
        return super().extra_state()

    @torch.no_grad()
    def load_state_dict(self, state: dict[str, Held], extra: dict[str, Any]) -> None:
        super().load_state_dict(state, extra)
        for p, served in self.served.items():
            served.copy_(p)

    def totals(self) -> dict[str, Any]:
        if self.meets:
            return {}
        server = self.worker.server
        of_ranks = gather((self.worker.taken, server.updates, max(server.staleness, default=0)))
        pieces, updates, staleness = zip(*of_ranks, strict=True)
        return {"ps": {"pieces": pieces, "updates": max(updates), "largest_staleness": max(staleness)}}

    def close(self) -> None:
        if not self.meets:
            self.settle()  # nobody works any more
            self.worker.leave()
