"""`strategy.compress`: which compressor a word means, and where ddp and hybrid fsdp call it.

torch has hooks for some of these words, but its PowerSGD keeps errors by bucket, which no checkpoint can name, and its
bf16 hook refuses gloo.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Mapping
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.futures import Future

from dtrain.comm.compressor import Cast, Compressor
from dtrain.comm.low_rank import PowerSGD
from dtrain.comm.quantize import Int8, OneBit
from dtrain.comm.top_k import TopK

# How far the losses of `dtrain verify` may be from one process, in 20 steps in which it learns 0.63 to 0.70. The
# largest distances found at 2 and 4 ranks with two seeds: fp16 5.1e-5, bf16 3.0e-4, int8 5.2e-4, onebit 0.11, powersgd
# 0.27 (rank 4 of matrices 32 wide), topk 0.22 with a tenth of the values, and 0.50 with a hundredth: 20 steps are too
# few to send each value once.
TOLERANCES = {"fp16": 2e-4, "bf16": 1e-3, "int8": 2e-3, "powersgd": 0.4, "topk": 0.35, "onebit": 0.2}


def make(
    word: str,
    parameters: Mapping[str, Tensor],
    group: dist.ProcessGroup,
    device: torch.device,
    *,
    rank: int = 4,
    ratio: float = 0.01,
    warmup: int = 0,
) -> Compressor:
    """Build the compressor of a word of `strategy.compress`."""
    usual = (parameters, group, device, warmup)
    if word in ("fp16", "bf16"):
        return Cast(torch.float16 if word == "fp16" else torch.bfloat16, *usual)
    if word == "powersgd":
        return PowerSGD(rank, *usual)
    if word == "topk":
        return TopK(ratio, *usual)
    return {"int8": Int8, "onebit": OneBit}[word](*usual)


# ---- where it is called --------------------------------------------------------------------------------------


class Worker:
    """A thread that averages one bucket after another while the backward pass continues.

    Ranks hand over their buckets in the same order, and one thread keeps it: collectives of two buckets never mix.
    """

    def __init__(self) -> None:
        self.tasks: queue.SimpleQueue[tuple[Callable[[], Tensor], Future[Tensor]]] = queue.SimpleQueue()
        threading.Thread(target=self.run, name="compress", daemon=True).start()

    def submit(self, task: Callable[[], Tensor]) -> Future[Tensor]:
        future: Future[Tensor] = Future()
        self.tasks.put((task, future))
        return future

    def run(self) -> None:
        while True:
            task, future = self.tasks.get()
            try:
                future.set_result(task())
            except Exception as error:  # a lost peer: raised where the backward pass waits
                future.set_exception(error)  # type: ignore[arg-type]


def register_ddp_hook(model: Any, module: nn.Module, compressor: Compressor) -> None:
    """Let a DistributedDataParallel model average each of its buckets with the compressor."""
    names = {id(p): name for name, p in module.named_parameters()}
    device = compressor.device
    if compressor.runner is None:  # one for all wrappers: bucket_mb=auto tries several
        compressor.runner = torch.cuda.Stream(device) if device.type == "cuda" else Worker()
    runner = compressor.runner

    def hook(_: object, bucket: Any) -> Future[Tensor]:
        buffer = bucket.buffer()
        gradients = {names[id(p)]: g for p, g in zip(bucket.parameters(), bucket.gradients(), strict=True)}

        def task() -> Tensor:
            compressor.average(gradients)
            return buffer

        if isinstance(runner, Worker):
            return runner.submit(task)
        runner.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(runner):  # beside the kernels of the backward pass
            future: Future[Tensor] = Future(devices=[device])
            future.set_result(task())
        return future

    hook.__annotations__.clear()  # DDP compares them with classes, and in this module they are strings
    model.register_comm_hook(None, hook)


def register_fsdp_hooks(module: nn.Module, compressor: Compressor) -> None:
    """Let hybrid FSDP2 average the shards of its replicas with the compressor.

    FSDP2 has a hook after its all-reduce over the replicas, but none in its place. So the replicas' group becomes one
    of a single rank, over which the all-reduce sends nothing, and the hook does the averaging.
    """
    alone = dist.new_group([dist.get_rank()], use_local_synchronization=True)
    for unit in module.modules():
        if hasattr(unit, "set_all_reduce_hook"):
            state = cast(Any, unit)._get_fsdp_state()
            groups = getattr(state, "_fsdp_param_groups", None) or [state._fsdp_param_group]
            for group in groups:
                if group is not None:
                    group.mesh_info.replicate_process_group = alone
                    cast(Any, unit).set_all_reduce_hook(fsdp_hook(module, group, compressor))


def fsdp_hook(module: nn.Module, group: Any, compressor: Compressor) -> Callable[[Tensor], None]:
    """Average what a unit's reduce-scatter returned: the padded shards of its parameters, one after the other."""

    def hook(reduced: Tensor) -> None:
        names = {id(p): name for name, p in module.named_parameters()}
        gradients, begin = {}, 0
        for p in (p for p in group.fsdp_params if p.sharded_param.requires_grad):
            size = p.sharded_size.numel()
            gradients[names[id(p.sharded_param)]] = reduced[begin : begin + size].view(p.sharded_size)
            begin += p.padded_sharded_param_size.numel()
        assert begin == reduced.numel(), "every trained parameter has a gradient"
        compressor.average(gradients)

    return hook
