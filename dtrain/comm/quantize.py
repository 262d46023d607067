"""int8 and onebit: blocks of values with a scale each, summed by one owner and sent back.

A reduce-scatter and an all-gather, as in a ring all-reduce, but of bytes: each rank owns a piece of every parameter,
receives the others' quantized values of it (all-to-all), sums them in fp32, quantizes the mean, and sends it to all
(all-gather). So a rank sends 2 (n - 1) / n codes per value, however many ranks there are. Both roundings have errors
to be made up for: the rank's own (`error`), and that of the mean, which only its owner knows (`owner_error`).
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import pad

from dtrain.checkpoint.layouts import flat_index
from dtrain.comm.compressor import Compressor, Gradients
from dtrain.util.dtensor import Held, flat_chunks

BLOCK = 256  # values that share a scale
MOST_PARTS, LEAST_PART = 4, 2**17  # of an exchange, and values of one
TINY = 1e-38  # the least scale: a block of zeros has none


class Quantized(Compressor):
    def encode(self, blocks: Tensor) -> Tensor:
        """Turn blocks of fp32 (…, BLOCK) into bytes (…, code)."""
        raise NotImplementedError

    def decode(self, codes: Tensor) -> Tensor:
        raise NotImplementedError

    def new_state(self, name: str, shape: tuple[int, ...]) -> dict[str, Tensor]:
        blocks = self.num_blocks(torch.Size(shape).numel())
        return super().new_state(name, shape) | {"owner_error": torch.zeros(blocks * BLOCK, device=self.device)}

    def num_blocks(self, numel: int) -> int:
        """Blocks of a parameter that each rank owns; the last ones may be empty."""
        return -(-numel // (self.num_ranks * BLOCK))

    def exchange(self, gradients: Gradients) -> None:
        """In parts, so that one is sent while another is quantized; the values are the same in any parts."""
        parts = [Part(self, part) for part in split(gradients)]
        for part in parts:
            part.send()
        for part in parts:
            part.send_mean()
        for part in parts:
            part.receive_mean()

    def state_dict(self) -> dict[str, Held]:
        """An owner's errors are its range of the flattened parameter: another number of ranks reads other ranges."""
        held = super().state_dict()
        for name, place in self.places.items():
            numel, piece = place.values.numel(), self.num_blocks(place.values.numel()) * BLOCK
            begin, end = (min(numel, r * piece) for r in (self.rank, self.rank + 1))
            first = flat_index(place.offset, place.whole_shape)
            values = self.state[f"{name}.owner_error"][: end - begin]
            held[f"comm.{name}.owner_error"] = flat_chunks(values, place.whole_shape, first + begin)
        return held


class Part:
    """Some of the gradients: sent to their owners, averaged, and sent back."""

    def __init__(self, compressor: Quantized, gradients: Gradients) -> None:
        self.compressor, self.gradients = compressor, gradients
        self.counts = [compressor.num_blocks(g.numel()) for g in gradients.values()]

    def send(self) -> None:
        """Quantize, and start the all-to-all."""
        own, n = self.compressor, self.compressor.num_ranks
        owed = [
            pad(own.owed(name, g).reshape(-1), (0, n * count * BLOCK - g.numel())).view(n, count, BLOCK)
            for (name, g), count in zip(self.gradients.items(), self.counts, strict=True)
        ]
        self.blocks = torch.cat(owed, dim=1)
        self.codes = own.encode(self.blocks)
        self.received = torch.empty_like(self.codes)
        self.work: Any = dist.all_to_all_single(self.received, self.codes, group=own.group, async_op=True)

    def send_mean(self) -> None:
        """As the owner of some values: quantize their mean over the ranks, and start the all-gather."""
        own = self.compressor
        rest = self.blocks.sub_(own.decode(self.codes)).split(self.counts, dim=1)
        for (name, gradient), part in zip(self.gradients.items(), rest, strict=True):
            own.keep(name, "error", part.reshape(-1)[: gradient.numel()])
        self.work.wait()
        mine = torch.cat([own.state[f"{name}.owner_error"].view(-1, BLOCK) for name in self.gradients])
        mine = torch.add(own.decode(self.received).mean(dim=0), mine, alpha=own.scale)
        self.code = own.encode(mine)
        self.work = dist.all_gather(list(self.codes.unbind()), self.code, group=own.group, async_op=True)
        for name, left in zip(self.gradients, mine.sub_(own.decode(self.code)).split(self.counts), strict=True):
            own.keep(name, "owner_error", left)

    def receive_mean(self) -> None:
        self.work.wait()
        means = self.compressor.decode(self.codes).split(self.counts, dim=1)
        for gradient, mean in zip(self.gradients.values(), means, strict=True):
            gradient.copy_(mean.reshape(-1)[: gradient.numel()].view(gradient.shape))


def split(gradients: Gradients) -> list[Gradients]:
    """Divide gradients into at most MOST_PARTS parts of whole parameters with about as many values each."""
    total = sum(g.numel() for g in gradients.values())
    size = max(LEAST_PART, -(-total // MOST_PARTS))
    parts: list[Gradients] = [{}]
    for name, gradient in gradients.items():
        if sum(g.numel() for g in parts[-1].values()) >= size:
            parts.append({})
        parts[-1][name] = gradient
    return parts


class Int8(Quantized):
    """A byte per value and 4 bytes per block."""

    def encode(self, blocks: Tensor) -> Tensor:
        return int8_codes(blocks)

    def decode(self, codes: Tensor) -> Tensor:
        return int8_values(codes)


class OneBit(Quantized):
    """The sign of each value, and the mean of the block's absolute values."""

    def encode(self, blocks: Tensor) -> Tensor:
        scale = blocks.abs().mean(dim=-1, keepdim=True)
        bits = (blocks >= 0).unflatten(-1, (-1, 8)).to(torch.uint8)
        packed = (bits << self.shifts(blocks.device)).sum(dim=-1, dtype=torch.uint8)
        return torch.cat([packed, scale.view(torch.uint8)], dim=-1)

    def decode(self, codes: Tensor) -> Tensor:
        bits = codes[..., : BLOCK // 8, None] >> self.shifts(codes.device) & 1
        return bits.flatten(-2).float().mul_(2).sub_(1).mul_(scale_of(codes, BLOCK // 8))

    def shifts(self, device: torch.device) -> Tensor:
        return torch.arange(8, dtype=torch.uint8, device=device)


def scale_of(codes: Tensor, begin: int) -> Tensor:
    return codes[..., begin:].contiguous().view(torch.float32)


def int8_codes(blocks: Tensor) -> Tensor:
    scale = blocks.abs().amax(dim=-1, keepdim=True).div_(127)
    values = blocks.div(scale.clamp(min=TINY)).round_().to(torch.int8)
    return torch.cat([values.view(torch.uint8), scale.view(torch.uint8)], dim=-1)


def int8_values(codes: Tensor) -> Tensor:
    values, scale = codes[..., :BLOCK].view(torch.int8), scale_of(codes, BLOCK)
    return values.float().mul_(scale)


def int8_mean(values: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Return the mean of a flat fp32 tensor over the ranks, with the same bits on all of them, without error feedback.

    Each value is rounded twice: by the rank that sends it, and as a part of the mean. Each time the error is at most
    half a step of its block, 1/254 of the block's largest value.
    """
    n = dist.get_world_size(group)
    num_blocks = -(-len(values) // (n * BLOCK))  # of each rank
    blocks = pad(values, (0, n * num_blocks * BLOCK - len(values))).view(n, num_blocks, BLOCK)
    codes = int8_codes(blocks)
    received = torch.empty_like(codes)
    dist.all_to_all_single(received, codes, group=group)
    dist.all_gather(list(codes.unbind()), int8_codes(int8_values(received).mean(dim=0)), group=group)
    return int8_values(codes).reshape(-1)[: len(values)]
