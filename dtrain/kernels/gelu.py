"""GELU after a linear layer, whose backward pass gives the layer's bias gradient on the way.

That gradient is the sum of GELU's own over all tokens: as a kernel of its own it reads again what GELU's backward pass
has just written, the widest matrix of a transformer's layer. The forward pass is plain operations, for a compiler to
fuse; the backward pass is one operation, on a GPU one kernel (gelu_gradient.py).
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from dtrain.shards import is_dtensor

SCALE = math.sqrt(8 / math.pi)
CUBIC = 0.044715 * SCALE


def gelu(x: Tensor, approximate: str) -> Tensor:
    """In compiled graphs the tanh approximation by the sigmoid, which it equals: (1 + tanh(u)) / 2 = sigmoid(2u).

    Their tanh takes so many instructions that arithmetic, and not memory, is the limit: 3.3 ms of a step of gpt2-124m
    at batch 64 on an H200, where reading and writing takes 2.3.
    """
    if approximate != "tanh" or not torch.compiler.is_compiling():
        return F.gelu(x, approximate=approximate)
    # No cast that does nothing: compiled inside an autograd function, it loses the gradient in torch 2.11
    narrow = x.dtype != torch.float32
    wide = x.float() if narrow else x
    out = wide * torch.sigmoid(wide * (SCALE + CUBIC * wide * wide))
    return out.to(x.dtype) if narrow else out


def can_fuse(linear: nn.Linear, x: Tensor) -> bool:
    """On a GPU, unless the layer is cut over ranks, or is more than a product (LoRA, float8)."""
    return x.is_cuda and type(linear) is nn.Linear and not is_dtensor(linear.weight)


def linear_gelu(x: Tensor, weight: Tensor, bias: Tensor, approximate: str) -> Tensor:
    """GELU of a linear layer's output. The product adds the bias; its gradient goes round by GELU's."""
    out: Tensor = LinearGelu.apply(F.linear(x, weight, bias.detach()), bias, approximate)
    return out


class LinearGelu(torch.autograd.Function):
    """GELU of `x`, in which `bias` is already: backward it gets the sum of x's gradient over rows."""

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
    """The gradient of x, and its sums over strips of rows, in float32: [strips, columns]."""
    if x.is_cuda:
        from dtrain.kernels.gelu_gradient import launch

        return launch(gradient, x, approximate == "tanh")
    wide = torch.ops.aten.gelu_backward(gradient.float(), x.float(), approximate=approximate)
    return wide.to(x.dtype), wide.sum(dim=0, keepdim=True)


STRIP = 256  # rows whose sum is one row of what the kernel gives


@gelu_backward.register_fake
def _(gradient: Tensor, x: Tensor, approximate: str) -> tuple[Tensor, Tensor]:
    strips = -(-x.shape[0] // STRIP) if x.is_cuda else 1
    return torch.empty_like(x), x.new_empty(strips, x.shape[1], dtype=torch.float32)
