"""A small convolutional network for small images (MNIST, digits): three convolutions and two linear layers."""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from dtrain.models.layers import CLASSIFY_METRICS, classify
from dtrain.models.resnet import conv_flops

NUM_LAYERS = 3


class Layer(nn.Module):
    """A 3x3 convolution and 2x2 max pooling."""

    def __init__(self, ins: int, outs: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(ins, outs, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        return F.max_pool2d(F.relu(self.conv(x)), 2)


class ConvNet(nn.Module):
    eval_metrics = CLASSIFY_METRICS

    def __init__(
        self,
        image_size: int,
        channels: int = 1,
        num_classes: int = 10,
        width: int = 32,
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        self.image_size = image_size
        side = image_size >> NUM_LAYERS
        if side < 1:
            raise ValueError(
                f"model.image_size={image_size}: must be at least {1 << NUM_LAYERS} pixels, "
                f"as each of {NUM_LAYERS} layers halves an image\n  fix: model.image_size={1 << NUM_LAYERS}"
            )
        widths = [channels, *(width << i for i in range(NUM_LAYERS))]
        self.layers = nn.ModuleDict({str(i): Layer(widths[i], widths[i + 1]) for i in range(NUM_LAYERS)})
        self.hidden = nn.Linear(widths[-1] * side**2, widths[-1])
        self.dropout = nn.Dropout(dropout)
        self.head = nn.Linear(widths[-1], num_classes)
        self.num_parameters = sum(p.numel() for p in self.parameters())

    def forward(self, inputs: Tensor, targets: Tensor | None = None) -> Tensor:
        x = inputs
        if x.is_cuda:  # the layout that tensor cores need; later ops keep it
            x = x.contiguous(memory_format=torch.channels_last)
        for layer in self.layers.values():
            x = layer(x)
        logits = self.head(self.dropout(F.relu(self.hidden(x.flatten(1)))))
        return logits if targets is None else classify(logits, targets, self.training)

    # ---- the plans -------------------------------------------------------------------------------------------

    def init_weights(self, name: str, weight: Tensor, generator: torch.Generator) -> None:
        """Fill one full weight, with the std that preserves the variance through a ReLU."""
        if name.endswith("bias"):
            weight.zero_()
        else:
            weight.normal_(0.0, math.sqrt(2 / math.prod(weight.shape[1:])), generator=generator)

    def fsdp_units(self) -> list[nn.Module]:
        """Return the modules gathered one at a time under fsdp; also the units of activation checkpointing."""
        return list(self.layers.values())

    def convolutions(self) -> Iterator[tuple[nn.Conv2d, int]]:
        """Yield every convolution, with the side of its output in pixels."""
        for i, layer in enumerate(self.layers.values()):
            assert isinstance(layer, Layer)
            yield layer.conv, self.image_size >> i

    def flops_per_sample(self) -> float:
        """FLOPs, forward and backward, of one image."""
        linear = sum(layer.in_features * layer.out_features for layer in (self.hidden, self.head))
        return conv_flops(self.convolutions(), linear)
