"""ddp with Horovod's all-reduce: DDP makes the buckets, and Horovod averages each while the backward pass runs.

Everything else (loss, norm, checkpoints, votes) still goes through torch.distributed, which also tells Horovod's
processes where they find each other.
"""

from __future__ import annotations

import contextlib
import os
from typing import Any, Literal

import horovod.torch as hvd
import torch
import torch.distributed as dist

from dtrain.comm.compressor import Compressor, Gradients
from dtrain.strategies.ddp import DDP
from dtrain.util import horovod_gloo
from dtrain.util.addresses import interface, own_address
from dtrain.util.collective import gather


class Horovod(DDP):
    def __init__(self, dp: int = -1, bucket_mb: int = 25, compress: Literal["none", "fp16"] = "none") -> None:
        super().__init__(dp=dp, bucket_mb=bucket_mb, compress=compress)

    def make_compressor(self) -> Compressor:
        connect(self.node_size)
        codec = hvd.Compression.fp16 if self.compress == "fp16" else hvd.Compression.none
        return HorovodAverage(codec, dict(self.module.named_parameters()), self.data_group, self.device)

    def close(self) -> None:
        hvd.shutdown()


class HorovodAverage(Compressor):
    """Averages a bucket's gradients with one all-reduce of Horovod."""

    def __init__(self, codec: Any, *arguments: Any) -> None:
        self.codec = codec
        super().__init__(*arguments)

    def compresses(self, shape: tuple[int, ...]) -> bool:
        return True

    def new_state(self, name: str, shape: tuple[int, ...]) -> dict[str, torch.Tensor]:
        return {}

    def exchange(self, gradients: Gradients) -> None:
        """One bucket is in flight at a time: Horovod cannot fuse several, which would change the order of summation."""
        flat = torch.cat([g.reshape(-1) for g in gradients.values()]).div_(self.num_ranks)
        mean = hvd.allreduce(flat, name=next(iter(gradients)), op=hvd.Sum, compression=self.codec)
        for gradient, part in zip(gradients.values(), mean.split([g.numel() for g in gradients.values()]), strict=True):
            gradient.copy_(part.view(gradient.shape))


def connect(local_size: int) -> None:
    """Initialize Horovod on all ranks; rank 0 has the store by which they find each other."""
    if hvd.is_initialized():
        return
    host = own_address()
    store = horovod_gloo.store(host, dist.get_world_size(), local_size)
    with store if dist.get_rank() == 0 else contextlib.nullcontext(0) as port:
        peers = gather((host, port))
        hosts, store_port = [host for host, _ in peers], peers[0][1]
        os.environ |= horovod_gloo.variables(hosts, dist.get_rank(), local_size, store_port, interface(host))
        hvd.init()
        dist.barrier()  # until all are connected
