"""GELU after a linear layer, whose backward pass also computes the layer's bias gradient.

The bias gradient is the sum of GELU's gradient over all tokens. A separate kernel would read again what GELU's backward
pass has just written, the widest matrix of a transformer's layer. The forward pass is plain ops, for a compiler to
fuse; the backward pass is one op, on a GPU one kernel (gelu_gradient.py).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from dtrain.kernels import CUBIC, SCALE, STRIP
from dtrain.util.dtensor import is_dtensor


def gelu(x: Tensor, approximate: str) -> Tensor:
    """In compiled graphs, compute the tanh approximation with a sigmoid: (1 + tanh(u)) / 2 = sigmoid(2u).

    Inductor's tanh takes so many instructions that it is compute-bound, not memory-bound: 3.3 ms of a step of gpt2-124m
    at batch 64 on an H200, where memory traffic takes 2.3.
    """
    if approximate != "tanh" or not torch.compiler.is_compiling():
        return F.gelu(x, approximate=approximate)
    # No no-op casts: compiled inside an autograd function, they lose the gradient in torch 2.11
    narrow = x.dtype != torch.float32
    wide = x.float() if narrow else x
    out = wide * torch.sigmoid(wide * (SCALE + CUBIC * wide * wide))
    return out.to(x.dtype) if narrow else out


def can_fuse(linear: nn.Linear, x: Tensor) -> bool:
    """True on a GPU, unless the layer is sharded or is more than a matmul (LoRA, float8)."""
    return x.is_cuda and type(linear) is nn.Linear and not is_dtensor(linear.weight)


def linear_gelu(x: Tensor, weight: Tensor, bias: Tensor, approximate: str) -> Tensor:
    """Return GELU of a linear layer's output. The matmul adds the bias; GELU's backward pass computes its gradient."""
    out: Tensor = LinearGelu.apply(F.linear(x, weight, bias.detach()), bias, approximate)
    return out


class LinearGelu(torch.autograd.Function):
    """GELU of `x`, which already includes `bias`. In backward, the bias gets the sum of x's gradient over rows."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, bias: Tensor, approximate: str) -> Tensor:
        ctx.save_for_backward(x)
        ctx.approximate, ctx.dtype = approximate, bias.dtype
        return gelu(x, approximate)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, None]:
        (x,) = ctx.saved_tensors
        of_x, sums = gelu_backward(gradient.contiguous().flatten(0, -2), x.flatten(0, -2), ctx.approximate)
        return of_x.view(x.shape), sums.sum(dim=0).to(ctx.dtype), None


@torch.library.custom_op("dtrain::gelu_backward", mutates_args=())
def gelu_backward(gradient: Tensor, x: Tensor, approximate: str) -> tuple[Tensor, Tensor]:
    """Return the gradient of x, and its sums over strips of rows, in fp32: [strips, columns]."""
    if x.is_cuda:
        from dtrain.kernels.gelu_gradient import launch

        return launch(gradient, x, approximate == "tanh")
    wide = torch.ops.aten.gelu_backward(gradient.float(), x.float(), approximate=approximate)
    return wide.to(x.dtype), wide.sum(dim=0, keepdim=True)


@gelu_backward.register_fake
def _(gradient: Tensor, x: Tensor, approximate: str) -> tuple[Tensor, Tensor]:
    strips = -(-x.shape[0] // STRIP) if x.is_cuda else 1
    return torch.empty_like(x), x.new_empty(strips, x.shape[1], dtype=torch.float32)
