"""Bugs in how gradients are reduced, averaged and accumulated."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from dtrain.commands.verify.mutations.registry import after, mutation, replace


def reduce_buckets(how: Callable[[Tensor, Any], Tensor]) -> None:
    """Let ddp reduce each bucket by `how(buffer, group)`."""
    from dtrain.strategies.ddp import DDP

    def make(usual: Any) -> Any:
        def with_buckets(self: Any, model: nn.Module, is_first: bool = True) -> nn.Module:
            wrapped: Any = usual(self, model, is_first)

            def hook(_: object, bucket: Any) -> Any:
                done: Any = torch.futures.Future()
                done.set_result(how(bucket.buffer(), self.data_group))
                return done

            hook.__annotations__.clear()
            wrapped.register_comm_hook(None, hook)
            return wrapped

        return with_buckets

    replace(DDP, "with_buckets", make)


def mean(buffer: Tensor, group: Any) -> Tensor:
    dist.all_reduce(buffer, group=group)
    return buffer.div_(dist.get_world_size(group))


@mutation
def summed_gradients() -> None:
    def how(buffer: Tensor, group: Any) -> Tensor:
        dist.all_reduce(buffer, group=group)
        return buffer

    reduce_buckets(how)


@mutation
def bucket_end() -> None:
    def how(buffer: Tensor, group: Any) -> Tensor:
        mean(buffer[:-4], group)
        return buffer

    reduce_buckets(how)


@mutation
def reduced_in_bf16() -> None:
    reduce_buckets(lambda buffer, group: mean(buffer.bfloat16(), group).to(buffer.dtype))


def scaled_by(factor: Callable[[int], float]) -> None:
    """Scale fsdp's reduced gradients (gloo has no reduction with another divisor)."""
    from dtrain.strategies.fsdp import FSDP

    def more(self: Any) -> None:
        for p in self.module.parameters():
            p.grad *= factor(self.sizes.dp)

    after(FSDP, "forward_backward", more)


@mutation
def fsdp_divisor_missing() -> None:
    scaled_by(lambda size: size)


@mutation
def averaged_twice() -> None:
    scaled_by(lambda size: 1 / size)


@mutation
def doubled_each_pass() -> None:
    from dtrain.strategies.ddp import DDP

    def make(usual: Any) -> Any:
        @contextlib.contextmanager
        def no_sync(self: Any, last: bool) -> Iterator[None]:
            with usual(self, last):
                yield
            for p in self.module.parameters() if not last else ():
                p.grad *= 2

        return no_sync

    replace(DDP, "no_sync", make)


@mutation
def passes_not_divided() -> None:
    from dtrain.strategies.base import Strategy

    def make(usual: Any) -> Any:
        def forward_backward(self: Any, inputs: Tensor, targets: Tensor) -> Tensor:
            self.num_passes = len(inputs) // self.micro_batch_size
            return usual(self, inputs, targets)

        return forward_backward

    replace(Strategy, "forward_backward", make)
    replace(Strategy, "weight", lambda usual: lambda self, targets: usual(self, targets) * self.num_passes)


@mutation
def last_pass_only() -> None:
    from deepspeed.runtime.engine import DeepSpeedEngine

    replace(
        DeepSpeedEngine, "set_gradient_accumulation_boundary", lambda usual: lambda self, is_boundary: usual(self, True)
    )


@mutation
def parameter_not_reduced() -> None:
    from dtrain.strategies.ddp import DDP

    def make(usual: Any) -> Any:
        def with_buckets(self: Any, model: nn.Module, is_first: bool = True) -> nn.Module:
            last = [name for name, _ in model.named_parameters()][-1]
            DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, [last])
            return usual(self, model, is_first)

        return with_buckets

    replace(DDP, "with_buckets", make)


@mutation
def sync_one_pass_early() -> None:
    from dtrain.strategies.ddp import DDP

    replace(DDP, "no_sync", lambda usual: lambda self, last: usual(self, not last))


@mutation
def replicas_not_reduced() -> None:
    from dtrain.strategies.fsdp import FSDP

    def more(self: Any) -> None:
        alone = dist.new_group([dist.get_rank()], use_local_synchronization=True)
        for unit in (unit for unit in self.module.modules() if hasattr(unit, "set_all_reduce_hook")):
            state = unit._get_fsdp_state()
            for group in getattr(state, "_fsdp_param_groups", None) or [state._fsdp_param_group]:
                if group is not None:
                    group.mesh_info.replicate_process_group = alone

    after(FSDP, "setup", more)


@mutation
def stale_chunk() -> None:
    from dtrain.comm import ring

    def make(usual: Any) -> Any:
        def all_reduce(values: Tensor, group: Any, trace: Any = None) -> None:
            n, rank = dist.get_world_size(group), dist.get_rank(group)
            own = values.tensor_split(n)[(rank + 2) % n].clone()
            usual(values, group, trace)
            values.tensor_split(n)[(rank + 2) % n].copy_(own)

        return all_reduce

    replace(ring, "all_reduce", make)


@mutation
def weights_not_sent() -> None:
    from dtrain.strategies import ps

    replace(ps, "copy_from_owners", lambda usual: lambda shards: None)
