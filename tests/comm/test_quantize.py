"""The mean in 8 bits: as near as its steps allow, and with the same bits on all ranks."""

from __future__ import annotations

import torch
import torch.distributed as dist

from dtrain.comm import quantize
from tests.world import spawn


def test_a_block_keeps_its_largest_value_and_zero() -> None:
    blocks = torch.randn(4, quantize.BLOCK) * torch.tensor([[1e-6], [1.0], [0.0], [1e6]])
    codes = quantize.int8_codes(blocks)
    assert codes.shape == (4, quantize.BLOCK + 4) and codes.dtype == torch.uint8
    back = quantize.int8_values(codes)
    for before, after in zip(blocks, back, strict=True):
        largest = before.abs().max()
        assert (before - after).abs().max() <= largest / 254 * 1.001
        torch.testing.assert_close(after.abs().max(), largest)
    assert torch.equal(quantize.int8_values(quantize.int8_codes(back)), back)


def means() -> None:
    n, rank = dist.get_world_size(), dist.get_rank()
    for length in (1, quantize.BLOCK * n, 1000):
        own = [torch.randn(length, generator=torch.Generator().manual_seed(r)) for r in range(n)]
        found, right = quantize.int8_mean(own[rank].clone(), dist.group.WORLD), torch.stack(own).mean(0)
        assert found.shape == right.shape
        largest = max(float(values.abs().max()) for values in own)
        assert float((found - right).abs().max()) <= 2 * largest / 254 * 1.001
        everywhere = [torch.empty_like(found) for _ in range(n)]
        dist.all_gather(everywhere, found)
        assert all(torch.equal(found, other) for other in everywhere)


def test_means() -> None:
    spawn(3, means)
