"""Checksums of many tensors in one launch, which finds them by their addresses: each byte is read once.

A checksum is the sum modulo 2^64 of a tensor's 32-bit words, each times an odd number that depends on its position. An
odd multiplier loses no bit. Words have 32 bits: with 64, two flipped sign bits would cancel out. Integer sums do not
depend on the order of the programs.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import triton  # type: ignore[import-not-found, unused-ignore]
import triton.language as tl  # type: ignore[import-not-found, unused-ignore]
from torch import Tensor

BLOCK = 4096  # words per program


@triton.jit
def add_up(table, owners, sums, count, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """A program adds one block of a tensor. The table has three rows: addresses, words, and first blocks."""
    block = tl.program_id(0)
    tensor = tl.load(owners + block).to(tl.int64)
    words = tl.load(table + tensor).to(tl.pointer_type(tl.int32))
    places = (block - tl.load(table + 2 * count + tensor)) * BLOCK + tl.arange(0, BLOCK).to(tl.int64)
    values = tl.load(words + places, mask=places < tl.load(table + count + tensor), other=0).to(tl.int64)
    odd = (places + 1) * -0x61C8864680B583EB  # splitmix64 without its last rounds
    odd = (odd ^ (odd >> 30)) * -0x40A7B892E31B1A47
    tl.atomic_add(sums + tensor, tl.sum(values * (odd ^ (odd >> 27) | 1)))


def of_gpu(tensors: Sequence[Tensor]) -> Tensor:
    """Return one int64 per tensor, without a host sync. All tensors are on one GPU."""
    device = tensors[0].device
    words = [_words(tensor) for tensor in tensors]
    sizes = torch.tensor([len(w) for w in words])
    blocks = (sizes + BLOCK - 1) // BLOCK
    rows = [torch.tensor([w.data_ptr() for w in words]), sizes, blocks.cumsum(0) - blocks]
    sums = torch.zeros(len(words), dtype=torch.int64, device=device)
    owners = torch.arange(len(words), dtype=torch.int32).repeat_interleave(blocks)
    if len(owners):
        table = torch.stack(rows).pin_memory().to(device, non_blocking=True)
        run: Any = add_up[(len(owners),)]
        with torch.cuda.device(device):
            run(table, owners.pin_memory().to(device, non_blocking=True), sums, len(words), BLOCK=BLOCK, num_warps=8)
    return sums


def _words(tensor: Tensor) -> Tensor:
    """Return the elements in their order as 32-bit words; a last odd byte or two is padded with zeros."""
    data = tensor.detach().reshape(-1)
    size = data.numel() * data.element_size()
    if size % 4 or data.data_ptr() % 4:
        data = torch.nn.functional.pad(data.view(torch.uint8), (0, -size % 4))
    return data.view(torch.int32)
