"""FairScale's sharded data parallel: every rank has all weights, but the optimizer state of its own share only.

OSS deals whole weights out to the ranks, balanced by size; an owner updates its weights and sends them to the others.
Under `sharded_ddp` a gradient, too, is summed at its owner only, and freed everywhere else (ZeRO-2); under `oss` the
gradients are DDP's (ZeRO-1). FairScale's own FSDP is refused by the launcher: it needs NCCL, so a GPU for every rank,
and torch's (strategy=fsdp) is its successor.
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

from dtrain.shards import Held
from dtrain.strategies.ddp import DDP
from dtrain.strategies.shared import compile_model


class FairScale(DDP):
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
        """Make the optimizer first: it says which rank owns which weight, and so where a gradient is sent."""
        self.oss = self.shard(self.make_whole_optimizer(model.named_parameters()))
        if self.mode == "oss" or self.sizes.dp == 1:
            return super().wrap(model)
        compile_model(model, self.compile)  # inside: the wrapper's forward pass sets up hooks
        return ShardedDataParallel(
            model,
            self.oss,
            process_group=self.data_group,
            sync_models_at_startup=False,  # all ranks drew the same weights
            # Else small gradients live in buffers that zero_grad(set_to_none=True) cuts them off from: what is then
            # reduced is not what is stepped on. The buffers would also keep what other ranks own.
            reduce_buffer_size=0,
            # Else every change between train() and eval() would move all weights to new memory.
            auto_refresh_trainable=False,
        )

    def shard(self, whole: torch.optim.Optimizer) -> OSS:
        """The same optimizer over this rank's weights only. Its groups carry every setting, so it needs no others."""
        oss = OSS(whole.param_groups, type(whole), group=self.data_group)
        oss.state = oss.optim.state  # its own stays empty; this way it is a plain optimizer's, of this rank's weights
        self.owned = {p for group in oss.optim.param_groups for p in group["params"]}
        return oss

    def no_sync(self, last: bool) -> contextlib.AbstractContextManager[Any]:
        if not last and isinstance(self.model, ShardedDataParallel):
            held_back: contextlib.AbstractContextManager[Any] = self.model.no_sync()
            return held_back
        return super().no_sync(last)

    def clip(self, parameters: list[nn.Parameter]) -> Tensor:
        """Clip what this rank owns, by one norm: the squares are summed over the owners."""
        owned = [p for p in parameters if p in self.owned]
        square = nn.utils.get_total_norm([p.grad for p in owned if p.grad is not None]).square().to(self.device)
        dist.all_reduce(square, group=self.data_group)
        norm = square.sqrt()
        if self.max_grad_norm is not None:
            nn.utils.clip_grads_with_norm_(owned, self.max_grad_norm, norm)
        return norm

    def state_dict(self) -> dict[str, Held]:
        """Of the optimizer inside, which has this rank's weights only: others' moments are left out, and not made."""
        self.optimizer = self.oss.optim
        try:
            return super().state_dict()
        finally:
            self.optimizer = self.oss
