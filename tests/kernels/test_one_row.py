"""The products of one token, beside the plain operations. All of it needs a GPU."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

pytestmark = pytest.mark.gpu
EPS = 1e-4  # as large as the squares of the inputs


def normal(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.randn(*shape, device="cuda").mul(shape[-1] ** -0.5 if len(shape) == 2 else 1.0).to(dtype)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("width", [256, 2048, 3072, 5120])
def test_products_are_those_of_plain_operations(width: int, dtype: torch.dtype) -> None:
    from dtrain.kernels.one_row import added, gated, rotated
    from dtrain.models.llama import rotate

    torch.manual_seed(0)
    x, norm = normal(1, 1, width, dtype=dtype) / 100, normal(1, 1, width, dtype=dtype)
    norm = norm.flatten().abs()
    residual = normal(1, 1, 512, dtype=dtype)
    normalized = F.rms_norm(x.float(), (width,), norm.float(), EPS).to(dtype)
    weight = normal(512, width, dtype=dtype)
    expected = residual + F.linear(x, weight)
    torch.testing.assert_close(added(x, weight, residual), expected, rtol=0, atol=5e-2)

    gate, up = normal(512, width, dtype=dtype), normal(512, width, dtype=dtype)
    expected = F.silu(F.linear(normalized, gate)) * F.linear(normalized, up)
    torch.testing.assert_close(gated(x, norm, EPS, gate, up), expected, rtol=0, atol=5e-2)

    q, k, v = normal(512, width, dtype=dtype), normal(128, width, dtype=dtype), normal(128, width, dtype=dtype)
    angle = torch.rand(1, 1, 1, 32, device="cuda") * 6
    rotary = torch.stack([angle.cos(), angle.sin()])
    heads = [F.linear(normalized, w).unflatten(-1, (-1, 64)).transpose(1, 2) for w in (q, k, v)]
    expected_heads = [rotate(heads[0], rotary), rotate(heads[1], rotary), heads[2]]
    for mine, other in zip(rotated(x, norm, EPS, q, k, v, rotary, 64), expected_heads, strict=True):
        torch.testing.assert_close(mine, other, rtol=0, atol=5e-2)
