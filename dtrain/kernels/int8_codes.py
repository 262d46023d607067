"""The codes of int8_blocks.py in a Triton kernel: COUNT values, which are whole blocks, and their scales."""

from __future__ import annotations

import triton  # type: ignore[import-not-found, unused-ignore]
import triton.language as tl  # type: ignore[import-not-found, unused-ignore]

from dtrain.kernels import BLOCK
from dtrain.kernels.int8_blocks import FIRST, SECOND

QUANT = tl.constexpr(BLOCK)
FIRST_STEPS, SECOND_STEPS = tl.constexpr(float(FIRST)), tl.constexpr(float(SECOND))


@triton.jit
def spread(scales, COUNT: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return each block's scale for all of its elements."""
    return tl.reshape(tl.broadcast_to(tl.expand_dims(scales, 1), (COUNT // QUANT, QUANT)), (COUNT,))


@triton.jit
def largest(x, COUNT: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return the largest element of each block."""
    return tl.max(tl.reshape(x, (COUNT // QUANT, QUANT)), axis=1)


@triton.jit
def decoded(codes, scales, COUNT: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return moments in fp32: int8 codes are of first moments, uint8 codes of second ones."""
    code = codes.to(tl.float32)
    if codes.dtype == tl.int8:
        return tl.div_rn(code * tl.abs(code), FIRST_STEPS * FIRST_STEPS) * spread(scales, COUNT)
    else:
        root = (code + 1.0) * (1.0 / SECOND_STEPS)
        return (root * root) * (root * root) * spread(scales, COUNT)


@triton.jit
def shares(x, scales, COUNT: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return magnitudes as shares of their block's largest one."""
    return tl.div_rn(x, spread(tl.where(scales > 0.0, scales, 1.0), COUNT))


@triton.jit
def above(position, noise):  # type: ignore[no-untyped-def]
    """Return 1 where a value that lies there between two codes, 0 to 1, is rounded up."""
    return tl.where(tl.floor(position * 65536.0 + 0.5) > noise.to(tl.float32), 1.0, 0.0)


@triton.jit
def first_codes(x, scales, noise, COUNT: tl.constexpr):  # type: ignore[no-untyped-def]
    share = shares(tl.abs(x), scales, COUNT)
    below = tl.minimum(tl.floor(tl.sqrt_rn(share) * FIRST_STEPS), FIRST_STEPS - 1.0)
    position = tl.div_rn(share * (FIRST_STEPS * FIRST_STEPS) - below * below, 2.0 * below + 1.0)
    code = below + above(position, noise)
    return tl.where(x < 0.0, -code, code).to(tl.int8)


@triton.jit
def second_codes(x, scales, noise, COUNT: tl.constexpr):  # type: ignore[no-untyped-def]
    share = shares(x, scales, COUNT)
    root = tl.floor(tl.sqrt_rn(tl.sqrt_rn(share)) * SECOND_STEPS)
    root = tl.minimum(tl.maximum(root, 1.0), SECOND_STEPS - 1.0)
    low, high = root * (1.0 / SECOND_STEPS), (root + 1.0) * (1.0 / SECOND_STEPS)
    low, high = (low * low) * (low * low), (high * high) * (high * high)
    code = root - 1.0 + above(tl.div_rn(share - low, high - low), noise)
    return code.to(tl.int32).to(tl.uint8)
