"""The mean over ranks in 8 bits: blocks of int8 with a float32 scale each, a quarter of the bytes of float32.

As in a ring, each rank sums one chunk, and the sums are gathered: an all-to-all, then an all-gather. int8 values of
different scales cannot be added on the way, as an all-reduce would do.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

BLOCK = 256  # values that share a scale
SCALE_BYTES = 4


def mean(values: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Return the mean of a flat float32 tensor over the ranks, with the same bits on all of them.

    Each value is rounded twice: by the rank that sends it, and as a part of the mean. Each time the error is at most
    half a step of its block, 1/254 of the block's largest value.
    """
    n = dist.get_world_size(group)
    chunk = -(-len(values) // (n * BLOCK)) * BLOCK
    padded = values.new_zeros(n * chunk)
    padded[: len(values)] = values
    sent = torch.cat([pack(part) for part in padded.split(chunk)])
    received = torch.empty_like(sent)
    dist.all_to_all_single(received, sent, group=group)
    mine = pack(torch.stack([unpack(part) for part in received.chunk(n)]).mean(0))
    means = [torch.empty_like(mine) for _ in range(n)]
    dist.all_gather(means, mine, group=group)
    return torch.cat([unpack(part) for part in means])[: len(values)]


def pack(values: Tensor) -> Tensor:
    """Return a flat float32 tensor, a multiple of BLOCK long, as bytes: all scales, then all values."""
    blocks = values.view(-1, BLOCK)
    scales = blocks.abs().amax(dim=1) / 127
    steps = (blocks / scales.clamp_min(torch.finfo(torch.float32).tiny)[:, None]).round_().to(torch.int8)
    return torch.cat([scales.view(torch.uint8), steps.flatten().view(torch.uint8)])


def unpack(message: Tensor) -> Tensor:
    num_blocks = len(message) // (BLOCK + SCALE_BYTES)
    scales, steps = message.split([num_blocks * SCALE_BYTES, num_blocks * BLOCK])
    return (steps.view(torch.int8).view(-1, BLOCK) * scales.view(torch.float32)[:, None]).flatten()
