"""The checksum kernel, on a GPU: every flipped bit and every swap changes it. tests/strategies has the CPU's."""

from __future__ import annotations

import random

import pytest
import torch

from dtrain.strategies.checksums import checksums


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.uint8])
def test_every_change_is_found_and_nothing_else(dtype: torch.dtype) -> None:
    draw, device = random.Random(0), torch.device("cuda")
    for shape in [(), (5,), (3, 7), (4097,), (17, 4093)]:
        tensor = (torch.randn(shape, device=device) * 50).to(dtype)
        others = [torch.ones(3, device=device), tensor, torch.zeros(0, device=device), torch.ones(5)]
        raw, size = tensor.reshape(-1).view(torch.uint8), tensor.element_size()
        before = int(checksums(others, device)[1])
        assert int(checksums([tensor.clone()], device)[0]) == before
        for _ in range(20):
            bit = draw.randrange(8 * len(raw))
            raw[bit // 8] ^= 1 << bit % 8
            assert int(checksums(others, device)[1]) != before, (shape, bit)
            raw[bit // 8] ^= 1 << bit % 8
            if len(raw) == size:
                continue
            a, b = draw.sample(range(len(raw) // size), 2)
            for i in (a, b):  # two signs
                raw[i * size + size - 1] ^= 128
            assert int(checksums(others, device)[1]) != before, (shape, a, b)
            for i in (a, b):
                raw[i * size + size - 1] ^= 128
        assert int(checksums(others, device)[1]) == before
    matrix = torch.randn(40, 300, device=device)
    assert checksums([matrix], device)[0] == checksums([matrix.t().contiguous().t()], device)[0]
    assert checksums([matrix], device)[0] != checksums([matrix.t()], device)[0]
