"""What each mutant of mutants.py changes, in the processes of one run of `dtrain verify` only.

Each function replaces a function of the real code, as the bug would have it. The training code has no switch for it.
"""

from __future__ import annotations

import contextlib
import functools
import types
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

MUTATIONS: dict[str, Callable[[], None]] = {}


def mutation(function: Callable[[], None]) -> Callable[[], None]:
    MUTATIONS[function.__name__.replace("_", "-")] = function
    return function


def replace(owner: Any, name: str, make: Callable[[Any], Any]) -> None:
    """Replace a function by what `make` returns for it."""
    usual = getattr(owner, name)
    setattr(owner, name, functools.wraps(usual)(make(usual)))


def after(owner: Any, name: str, more: Callable[..., object]) -> None:
    """Do more after a method, which returns what it did."""

    def make(usual: Any) -> Any:
        def both(self: Any, *arguments: Any, **named: Any) -> Any:
            result = usual(self, *arguments, **named)
            more(self)
            return result

        return both

    replace(owner, name, make)


# ---- gradients -----------------------------------------------------------------------------------------------------


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


# ---- the mean, the norm --------------------------------------------------------------------------------------------


@mutation
def mean_of_pass_means() -> None:
    from dtrain.strategies.base import Strategy

    replace(Strategy, "weight", lambda usual: lambda self, targets: 1.0)


MUTATIONS["mean-of-pass-means-pipeline"] = mean_of_pass_means


@mutation
def mean_of_rank_means() -> None:
    from dtrain.models.layers import IGNORED
    from dtrain.strategies.base import Strategy

    def count_targets(self: Any, targets: Tensor) -> None:
        self.mean_count = (targets != IGNORED).sum().float() * self.micro_batch_size / len(targets)

    replace(Strategy, "count_targets", lambda usual: count_targets)


@mutation
def norm_times_world() -> None:
    from dtrain.strategies.base import Strategy

    replace(Strategy, "norm", lambda usual: lambda self, parameters: usual(self, parameters) * dist.get_world_size())


@mutation
def local_norm() -> None:
    from dtrain.strategies.base import Strategy
    from dtrain.strategies.grad_norm import norm_of
    from dtrain.util.dtensor import local

    def norm(self: Any, parameters: list[nn.Parameter]) -> Tensor:
        return norm_of([local(p.grad) for p in parameters if p.grad is not None])

    replace(Strategy, "norm", lambda usual: norm)


@mutation
def copies_in_norm() -> None:
    from dtrain.strategies import grad_norm

    replace(grad_norm, "_num_shards", lambda usual: lambda gradient: dist.get_world_size())


@mutation
def clip_before_unscale() -> None:
    from dtrain.strategies.base import Strategy

    def make(usual: Any) -> Any:
        def clip(self: Any, parameters: list[nn.Parameter]) -> Tensor:
            gradients = [p.grad for p in parameters if p.grad is not None]
            torch._foreach_mul_(gradients, self.precision.scale)
            norm: Tensor = usual(self, parameters)
            torch._foreach_mul_(gradients, 1 / self.precision.scale)
            return norm

        return clip

    replace(Strategy, "clip", make)


# ---- pipelines, tensor parallel ------------------------------------------------------------------------------------


@mutation
def tied_weight_twice() -> None:
    from dtrain.strategies.pipeline_stages import TiedWeights

    replace(TiedWeights, "counted_elsewhere", lambda usual: lambda self: set())


@mutation
def tied_gradient_alone() -> None:
    from dtrain.strategies.pipeline_stages import TiedWeights

    replace(TiedWeights, "sum_gradients", lambda usual: lambda self: None)


@mutation
def other_targets() -> None:
    from dtrain.strategies.pipeline import Pipeline

    def make(usual: Any) -> Any:
        return lambda self, inputs, targets, train: usual(self, inputs, targets.roll(self.micro_batch_size, 0), train)

    replace(Pipeline, "run", make)


@mutation
def passes_divided_twice() -> None:
    from dtrain.strategies import pipeline

    for name, schedule in list(pipeline.SCHEDULES.items()):
        pipeline.SCHEDULES[name] = functools.partial(
            lambda kind, *arguments, **named: kind(*arguments, **named | {"scale_grads": True}), schedule
        )


@mutation
def stale_stage() -> None:
    from dtrain.strategies.pipeline import Pipeline

    def make(usual: Any) -> Any:
        def update(self: Any, loss: Tensor) -> Any:
            if self.pp_rank == 1:
                now = {p: p.grad for p in self.module.parameters()}
                before = getattr(self, "before", {p: torch.zeros_like(p) for p in now})
                for p, gradient in before.items():
                    p.grad = gradient
                self.before = now
            return usual(self, loss)

        return update

    replace(Pipeline, "update", make)


@mutation
def norm_weights_not_reduced() -> None:
    from torch.distributed.tensor import DTensor

    from dtrain.strategies import tensor
    from dtrain.util.dtensor import is_dtensor

    def finish_sums(model: nn.Module) -> None:
        """Call a partial sum the whole one."""
        for p in (p for p in model.parameters() if is_dtensor(p) and p.grad is not None):
            gradient: Any = p.grad
            if any(placement.is_partial() for placement in gradient.placements):
                p.grad = DTensor.from_local(
                    gradient.to_local(),
                    p.device_mesh,  # type: ignore[attr-defined]
                    p.placements,  # type: ignore[attr-defined]
                    run_check=False,
                )

    replace(tensor, "finish_sums", lambda usual: finish_sums)


MUTATIONS["adapters-not-reduced"] = norm_weights_not_reduced


@mutation
def vocabulary_max() -> None:
    from torch.distributed.tensor.parallel import loss as module

    loss: Any = module
    ours: Any = types.SimpleNamespace(**vars(loss.funcol))
    usual = ours.all_reduce
    ours.all_reduce = lambda x, reduceOp, group: x if reduceOp == "MAX" else usual(x, reduceOp, group)
    loss.funcol = ours


# ---- data ----------------------------------------------------------------------------------------------------------


@mutation
def same_data() -> None:
    from dtrain.data.loader import Loader

    replace(Loader, "request", lambda usual: lambda self, position: self._samples(position, self.rank_batch_size))


@mutation
def order_by_rank() -> None:
    from dtrain.data import loader

    replace(loader, "permutation", lambda usual: lambda seed, epoch, size: usual(seed + dist.get_rank(), epoch, size))


@mutation
def epochs_alike() -> None:
    from dtrain.data import loader

    replace(loader, "permutation", lambda usual: lambda seed, epoch, size: usual(seed, 0, size))


@mutation
def draws_alike_in_batch() -> None:
    from dtrain.data import loader

    replace(loader, "sample_keys", lambda usual: lambda seed, epoch, indices: usual(seed, epoch, 0 * indices))


@mutation
def draws_alike_each_epoch() -> None:
    from dtrain.data import loader

    replace(loader, "sample_keys", lambda usual: lambda seed, epoch, indices: usual(seed, 0, indices))


# ---- random numbers, initial weights -------------------------------------------------------------------------------


def random_rank(choose: Callable[[], int]) -> None:
    from dtrain.strategies.base import Strategy

    after(Strategy, "setup", lambda self: setattr(self, "random_rank", choose()))


@mutation
def dropout_alike() -> None:
    random_rank(lambda: 0)


@mutation
def dropout_differs() -> None:
    random_rank(dist.get_rank)


@mutation
def dropout_each_step() -> None:
    from dtrain.train import process

    replace(process, "seed_everything", lambda usual: lambda seed, step, data_rank: usual(seed, 0, data_rank))


@mutation
def recompute_draws_anew() -> None:
    from dtrain.strategies import recompute

    replace(recompute, "recompute", lambda usual: functools.partial(usual, preserve_rng_state=False))


@mutation
def weights_by_rank() -> None:
    from dtrain.checkpoint.initial_weights import Drawn

    after(Drawn, "__init__", lambda self: setattr(self, "seed", self.seed + dist.get_rank()))


@mutation
def eval_drops() -> None:
    replace(nn.Module, "eval", lambda usual: lambda self: self)


# ---- optimizer, resume ---------------------------------------------------------------------------------------------


@mutation
def norms_decay() -> None:
    from dtrain.optim import build

    def make(usual: Any) -> Any:
        def grouped(named_parameters: Any, weight_decay: float, *more: Any, **named: Any) -> Any:
            groups, fused = usual(named_parameters, weight_decay, *more, **named)
            return [group | {"weight_decay": weight_decay} for group in groups], fused

        return grouped

    replace(build, "grouped", make)


@mutation
def schedule_by_world() -> None:
    from dtrain.train import loop

    ranks: Any = loop

    def make(usual: Any) -> Any:
        def set_up(*arguments: Any) -> Any:
            run = usual(*arguments)
            schedule = run.schedule
            run.schedule = lambda step: schedule(step * dist.get_world_size())
            return run

        return set_up

    replace(ranks, "set_up", make)


def resumed_at(position: Callable[[int, int], int]) -> None:
    """Let a resumed run begin at `position(samples, batch size)`."""
    from dtrain.train import setup

    def make(usual: Any) -> Any:
        def load_newest(saver: Any, cfg: Any, *more: Any) -> Any:
            path, step, samples, spikes = usual(saver, cfg, *more)
            return path, step, position(samples, cfg.train.global_batch_size), spikes

        return load_newest

    replace(setup, "load_newest", make)


@mutation
def batch_skipped() -> None:
    resumed_at(lambda samples, batch_size: samples + batch_size)


@mutation
def data_restarts() -> None:
    resumed_at(lambda samples, batch_size: 0)


@mutation
def rank_data_dropped() -> None:
    from dtrain.data.loader import Loader

    def make(usual: Any) -> Any:
        def request(self: Any, position: int) -> Any:
            is_last = self.shuffle and dist.get_rank() == dist.get_world_size() - 1
            return usual(self, position + self.global_batch_size * is_last)

        return request

    replace(Loader, "request", make)


@mutation
def moments_lost() -> None:
    from dtrain.strategies.base import Strategy

    def more(self: Any) -> None:
        for slots in self.optimizer.state.values():
            for value in slots.values():
                if value.dim():
                    value.zero_()

    after(Strategy, "load_state_dict", more)


@mutation
def updates_from_zero() -> None:
    from dtrain.strategies.base import Strategy

    after(Strategy, "load_state_dict", lambda self: [slots["step"].zero_() for slots in self.optimizer.state.values()])


@mutation
def masters_not_loaded() -> None:
    from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer

    from dtrain.strategies.deepspeed import Zero

    def make(usual: Any) -> Any:
        def load_state_dict(self: Any, *arguments: Any) -> None:
            update = DeepSpeedZeroOptimizer.update_lp_params
            DeepSpeedZeroOptimizer.update_lp_params = lambda self: None
            usual(self, *arguments)
            DeepSpeedZeroOptimizer.update_lp_params = update

        return load_state_dict

    replace(Zero, "load_state_dict", make)
