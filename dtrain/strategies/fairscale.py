"""FairScale's sharded data parallel: every rank has all weights, but only its own share of the optimizer state.

OSS assigns whole weights to ranks, balanced by size; the owner updates its weights and broadcasts them. Under
`sharded_ddp` each gradient is reduced only to its owner and freed elsewhere (ZeRO-2); under `oss` DDP all-reduces the
gradients (ZeRO-1). The launcher refuses FairScale's own FSDP: it needs NCCL, so one GPU per rank, and torch's FSDP
(strategy=fsdp) is its successor.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable
from typing import Any, Literal

import torch
import torch.distributed as dist
from fairscale.nn.data_parallel import ShardedDataParallel
from fairscale.optim import OSS
from torch import Tensor, nn

from dtrain.strategies.compile import compile_model
from dtrain.strategies.ddp import DDP
from dtrain.util.dtensor import Held


class FairScale(DDP):
    updates_together = False  # each rank updates the weights that it owns

    def __init__(self, dp: int = -1, mode: Literal["oss", "sharded_ddp", "fsdp"] = "sharded_ddp") -> None:
        super().__init__(dp=dp)
        assert mode != "fsdp", "the launcher refuses it"
        self.mode = mode

    def setup(
        self,
        model: nn.Module,
        make_optimizer: Callable[[Iterable[tuple[str, nn.Parameter]]], torch.optim.Optimizer],
        **options: Any,
    ) -> None:
        def sharded(_: Iterable[tuple[str, nn.Parameter]]) -> torch.optim.Optimizer:
            return self.oss

        self.make_whole_optimizer = make_optimizer
        super().setup(model, sharded, **options)

    def wrap(self, model: nn.Module) -> nn.Module:
        """Create the optimizer first: it decides which rank owns each weight, and so where a gradient is reduced."""
        self.oss = self.shard(self.make_whole_optimizer(model.named_parameters()))
        if self.mode == "oss" or self.sizes.dp == 1:
            return super().wrap(model)
        self.reduced = self.owned
        compile_model(model, self.compile)  # inside the wrapper, whose forward pass sets up hooks
        return ShardedDataParallel(
            model,
            self.oss,
            process_group=self.data_group,
            sync_models_at_startup=False,  # all ranks drew the same weights
            # Otherwise small gradients are views of buffers, and zero_grad(set_to_none=True) detaches them: the reduced
            # values are then not the ones that the optimizer uses. The buffers would also keep what other ranks own.
            reduce_buffer_size=0,
            # Otherwise every switch between train() and eval() would move all weights to new memory.
            auto_refresh_trainable=False,
        )

    def shard(self, whole: torch.optim.Optimizer) -> OSS:
        """Return the same optimizer over this rank's weights only. Its param groups carry all settings."""
        oss = OSS(whole.param_groups, type(whole), group=self.data_group)
        oss.state = oss.optim.state  # OSS's own is empty; the inner one has this rank's weights
        self.owned = {p for group in oss.optim.param_groups for p in group["params"]}
        return oss

    def no_sync(self, last: bool) -> contextlib.AbstractContextManager[Any]:
        if not last and isinstance(self.model, ShardedDataParallel):
            held_back: contextlib.AbstractContextManager[Any] = self.model.no_sync()
            return held_back
        return super().no_sync(last)

    def clip(self, parameters: list[nn.Parameter]) -> Tensor:
        """Clip the gradients that this rank owns by one norm: the squares are all-reduced over the owners."""
        owned = [p for p in parameters if p in self.owned]
        square = nn.utils.get_total_norm([p.grad for p in owned if p.grad is not None]).square().to(self.device)
        dist.all_reduce(square, group=self.data_group)
        norm = square.sqrt()
        if self.max_grad_norm is not None:
            nn.utils.clip_grads_with_norm_(owned, self.max_grad_norm, norm)
        return norm

    def average_weights(self, decay: float, evaluate: bool) -> None:
        """Average what this rank owns. The launcher refuses to evaluate with it: no rank has the whole average."""
        self.optimizer = self.oss.optim
        super().average_weights(decay, evaluate)
        self.optimizer = self.oss

    def state_dict(self) -> dict[str, Held]:
        """Use the inner optimizer, which has only this rank's weights: other ranks' moments are not created."""
        self.optimizer = self.oss.optim
        try:
            return super().state_dict()
        finally:
            self.optimizer = self.oss
