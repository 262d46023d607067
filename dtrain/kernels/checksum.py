"""Checksums of many tensors in one launch, which finds them by their addresses: each byte is read once.

A checksum is the sum modulo 2^64 of a tensor's 32-bit words, each times an odd number that depends on its position. An
odd multiplier loses no bit. Words have 32 bits: with 64, two flipped sign bits would cancel out. Integer sums do not
depend on the order of the programs.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
import triton  # type: ignore[import-not-found, unused-ignore]
import triton.language as tl  # type: ignore[import-not-found, unused-ignore]
from torch import Tensor

BLOCK = 4096  # words per program


@triton.jit
def hashed(places):  # type: ignore[no-untyped-def]
    """Return a hash of each place in a block. All are different: it is a permutation of 32 bits."""
    mixed = (places + 1).to(tl.uint32) * 0x9E3779B1
    mixed = (mixed ^ (mixed >> 15)) * 0x85EBCA77
    return mixed ^ (mixed >> 13)


@triton.jit
def add_up(table, owners, sums, count, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """A program adds one block of a tensor. The table has three rows: addresses, words, and first blocks."""
    block = tl.program_id(0)
    tensor = tl.load(owners + block).to(tl.int64)
    words = tl.load(table + tensor).to(tl.pointer_type(tl.int32))
    number = block - tl.load(table + 2 * count + tensor)
    here = tl.arange(0, BLOCK)
    places = number * BLOCK + here
    values = tl.load(words + places, mask=places < tl.load(table + count + tensor), other=0).to(tl.int64)
    total = tl.sum(values * (hashed(here).to(tl.int64) * 2 + 1))
    of_block = (number + 1) * -0x61C8864680B583EB
    tl.atomic_add(sums + tensor, total * ((of_block ^ (of_block >> 30)) | 1))


def of_gpu(tensors: Sequence[Tensor]) -> Tensor:
    """Return one int64 per tensor, without a host sync. All tensors are on one GPU."""
    device = tensors[0].device
    held = [_in_words(tensor) for tensor in tensors]
    table, owners = _tables(device, *((t.data_ptr(), t.numel() * t.element_size() // 4) for t in held))
    sums = torch.zeros(len(held), dtype=torch.int64, device=device)
    if len(owners):
        run: Any = add_up[(len(owners),)]
        with torch.cuda.device(device):
            run(table, owners, sums, len(held), BLOCK=BLOCK, num_warps=8)
    return sums


def _in_words(tensor: Tensor) -> Tensor:
    """Return the tensor, or a copy of it with its elements in order and padded with zeros to whole 32-bit words."""
    size = tensor.numel() * tensor.element_size()
    if tensor.is_contiguous() and not size % 4 and not tensor.data_ptr() % 4:
        return tensor
    return torch.nn.functional.pad(tensor.detach().reshape(-1).view(torch.uint8), (0, -size % 4))


@functools.lru_cache(maxsize=8)
def _tables(device: torch.device, *places: tuple[int, int]) -> tuple[Tensor, Tensor]:
    """Return the kernel's table for these addresses and sizes, and which tensor owns each block. Weights stay put."""
    addresses, sizes = torch.tensor(places).unbind(1)
    blocks = (sizes + BLOCK - 1) // BLOCK
    owners = torch.arange(len(places), dtype=torch.int32).repeat_interleave(blocks)
    return torch.stack([addresses, sizes, blocks.cumsum(0) - blocks]).to(device), owners.to(device)
