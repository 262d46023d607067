"""ResNet (He et al., 2015, arXiv:1512.03385) with the stride on the 3x3 convolution, as is common today.

Convolutions, then the mean over the image, then a linear layer. It has no tensor or pipeline plan: all its ranks are
data ranks, which the batch norm relies on (dtrain/models/batchnorm.py).
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from dtrain.models import batchnorm
from dtrain.models.batchnorm import BatchNorm
from dtrain.models.layers import CLASSIFY_METRICS, classify


def conv(ins: int, outs: int, kernel: int, stride: int = 1) -> nn.Conv2d:
    return nn.Conv2d(ins, outs, kernel, stride, kernel // 2, bias=False)  # the norm after it has a bias


class Block(nn.Module):
    """Two 3x3 convolutions, or a bottleneck of 1x1, 3x3 and 1x1 with four times the channels at its end."""

    def __init__(self, ins: int, width: int, stride: int, bottleneck: bool, mode: Literal["sync", "local"]) -> None:
        super().__init__()
        self.outs = 4 * width if bottleneck else width
        if bottleneck:
            convs = [conv(ins, width, 1), conv(width, width, 3, stride), conv(width, self.outs, 1)]
        else:
            convs = [conv(ins, width, 3, stride), conv(width, width, 3)]
        self.convs = nn.ModuleList(convs)
        self.norms = nn.ModuleList(BatchNorm(c.out_channels, mode) for c in convs)
        self.shortcut = self.shortcut_norm = None
        if stride > 1 or ins != self.outs:
            self.shortcut, self.shortcut_norm = conv(ins, self.outs, 1, stride), BatchNorm(self.outs, mode)

    def forward(self, x: Tensor) -> Tensor:
        residual = x
        if self.shortcut is not None and self.shortcut_norm is not None:
            residual = self.shortcut_norm(self.shortcut(x))
        for i, (convolution, norm) in enumerate(zip(self.convs, self.norms, strict=True)):
            x = norm(convolution(F.relu(x) if i else x))
        return F.relu(x + residual)


class ResNet(nn.Module):
    eval_metrics = CLASSIFY_METRICS

    def __init__(
        self,
        blocks: list[int],
        bottleneck: bool,
        image_size: int = 224,
        channels: int = 3,
        num_classes: int = 1000,
        width: int = 64,
        stem: Literal["auto", "large", "small"] = "auto",
        batch_norm: Literal["sync", "local"] = "sync",
        zero_init: bool = False,
    ) -> None:
        super().__init__()
        self.image_size, self.zero_init = image_size, zero_init
        self.large_stem = image_size >= 64 if stem == "auto" else stem == "large"
        self.stem = conv(channels, width, 7, 2) if self.large_stem else conv(channels, width, 3)
        self.stem_norm = BatchNorm(width, batch_norm)
        layers, ins = [], width
        for stage, num_blocks in enumerate(blocks):
            for i in range(num_blocks):
                layers.append(Block(ins, width << stage, 2 if stage and i == 0 else 1, bottleneck, batch_norm))
                ins = layers[-1].outs
        self.layers = nn.ModuleDict({str(i): layer for i, layer in enumerate(layers)})
        self.head = nn.Linear(ins, num_classes)
        self.num_parameters = sum(p.numel() for p in self.parameters())

    def forward(self, inputs: Tensor, targets: Tensor | None = None) -> Tensor:
        x = inputs
        if x.is_cuda:  # the layout that tensor cores need; later ops keep it
            x = x.contiguous(memory_format=torch.channels_last)
        x = F.relu(self.stem_norm(self.stem(x)))
        if self.large_stem:
            x = F.max_pool2d(x, 3, 2, 1)
        for layer in self.layers.values():
            x = layer(x)
        logits = self.head(x.float().mean(dim=(2, 3)))  # the backward pass of a pooling layer is not deterministic
        batchnorm.average_statistics(self)
        return logits if targets is None else classify(logits, targets, self.training)

    # ---- the plans -------------------------------------------------------------------------------------------

    def init_weights(self, name: str, weight: Tensor, generator: torch.Generator) -> None:
        """Fill one full weight or running statistic, each with its own generator."""
        if name.endswith("bias") or name.endswith("running_mean"):
            weight.zero_()
        elif "norm" in name:  # 1; or 0 at the end of a block if zero_init, so that the block starts as its shortcut
            last = next(iter(self.layers.values())).norms
            assert isinstance(last, nn.ModuleList)
            weight.fill_(0.0 if self.zero_init and name.endswith(f"norms.{len(last) - 1}.weight") else 1.0)
        elif weight.dim() == 4:  # preserves the gradients' variance through a ReLU (He et al., 2015, arXiv:1502.01852)
            outs, _, height, across = weight.shape
            weight.normal_(0.0, math.sqrt(2 / (outs * height * across)), generator=generator)
        else:
            weight.normal_(0.0, 0.01, generator=generator)

    def fsdp_units(self) -> list[nn.Module]:
        """Return the modules gathered one at a time under fsdp; also the units of activation checkpointing."""
        return list(self.layers.values())

    def convolutions(self) -> Iterator[tuple[nn.Conv2d, int]]:
        """Yield every convolution, with the side of its output in pixels."""
        side = -(-self.image_size // 2) if self.large_stem else self.image_size
        yield self.stem, side
        side = -(-side // 2) if self.large_stem else side
        for block in self.layers.values():
            assert isinstance(block, Block)
            before = side
            for layer in block.convs:
                assert isinstance(layer, nn.Conv2d)
                side = -(-side // layer.stride[0])
                yield layer, side
            if block.shortcut is not None:
                yield block.shortcut, -(-before // block.shortcut.stride[0])

    def flops_per_sample(self) -> float:
        """FLOPs, forward and backward, of one image: 2 per multiplication, three times; the image needs no gradient."""
        return conv_flops(self.convolutions(), self.head.in_features * self.head.out_features)


def conv_flops(convolutions: Iterator[tuple[nn.Conv2d, int]], linear: int) -> float:
    """FLOPs, forward and backward: three times all convolutions and `linear`, but the first convolution twice."""
    forward = [
        side**2 * layer.out_channels * layer.in_channels * layer.kernel_size[0] ** 2 for layer, side in convolutions
    ]
    return 2.0 * (3 * (sum(forward) + linear) - forward[0])
