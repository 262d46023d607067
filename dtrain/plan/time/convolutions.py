"""One GPU's work in a pass of a convolutional network: each convolution is a matmul."""

from __future__ import annotations

from dtrain.config.hardware import Hardware
from dtrain.plan.model_shape import Convolution, Convolutions
from dtrain.plan.time.compute import Pass, kernels_s
from dtrain.plan.time.roofline import product_s
from dtrain.plan.time.stack import Stack

# A batch norm reads its input twice (statistics, then values) and writes once; the activation reads and writes; the
# backward pass takes twice as much. Ours computes norms in fp32 (dtrain/models/batchnorm.py), eager in several kernels.
NORM_BYTES = {"eager": (16.0, 34.0), "compiled": (12.0, 24.0), "fused": (12.0, 20.0)}


def network(shape: Convolutions, hardware: Hardware, stack: Stack, batch: int, size: int) -> tuple[Pass, Pass]:
    """(forward, backward) of the whole network over `batch` images."""
    forward, backward = Pass(), Pass()
    for i, layer in enumerate(shape.layers):
        there, back = convolution(layer, hardware, stack, batch, size, first=i == 0)
        forward, backward = forward + there, backward + back
    for ins, outs in shape.linear:
        one = product_s(hardware, batch, ins, outs, size=size)
        forward, backward = forward + Pass(one, kernels=3), backward + Pass(2 * one, kernels=6)
    return forward, backward


def convolution(
    layer: Convolution, hardware: Hardware, stack: Stack, batch: int, size: int, first: bool
) -> tuple[Pass, Pass]:
    """One convolution with its norm and activation, as the matmul of its patches and its filters."""
    rows, inner = batch * layer.out_size**2, layer.in_channels * layer.kernel**2
    forward = product_s(hardware, rows, inner, layer.out_channels, size=size)
    weights = product_s(hardware, inner, rows, layer.out_channels, size=size)
    inputs = 0.0 if first else product_s(hardware, rows, layer.out_channels, inner, size=size)
    there, back = NORM_BYTES[stack.kernels] if layer.norm else (2.0 * size, 3.0 * size)
    numbers = float(batch * layer.outputs)
    return (
        Pass(forward, 0.0, kernels_s(hardware, stack.kernels, numbers * there), 8),
        Pass(inputs + weights, 0.0, kernels_s(hardware, stack.kernels, numbers * back), 8),
    )
