"""AdamW's moments in 8 bits, with plain ops: the same bits as the kernel of adamw.py.

BLOCK values of a row share a fp32 scale, the largest magnitude among them, which is kept exactly. The codes are roots:
a first moment is scale × (code / 127)², with the code's sign, a second one is scale × (code / 256)⁴ with codes from 1
to 256 (saved less 1). So a step between two codes is a few percent of a value, not of the scale, and both the moment
and the root of the second one span 1 to 1/16,000 and more. No second moment is rounded to 0: the update would divide by
it.

A value between two codes gets the upper one with a probability equal to its relative distance from the lower one, as in
stochastic_rounding.py: in most steps a moment changes by less than the distance of two codes. Without noise it gets the
nearer one. What has been decoded is encoded to the same codes and scales.
"""

from __future__ import annotations

import torch
from torch import Tensor

from dtrain.kernels import BLOCK

FIRST, SECOND = 127, 256  # codes: of the first moment to each side of 0, and of the second one
NEAREST = 1 << 15  # the noise of 16 bits that rounds to the nearer code


def values(codes: Tensor, scales: Tensor) -> Tensor:
    """Return moments in fp32, flat. int8 codes are of first moments, uint8 codes of second ones."""
    code = codes.reshape(-1, BLOCK).float()
    shares = code * code.abs() / FIRST**2 if codes.dtype == torch.int8 else ((code + 1) / SECOND).square().square()
    return (shares * scales.reshape(-1, 1)).view(-1)


def first_codes(x: Tensor, noise: Tensor | int = NEAREST) -> tuple[Tensor, Tensor]:
    """Return int8 codes and scales of first moments, flat. `noise`: 16 random bits for each."""
    shares, scales = relative(x.abs())
    below = (shares.sqrt() * FIRST).floor_().clamp_(max=FIRST - 1)
    position = (shares * FIRST**2 - below * below) / (2 * below + 1)
    code = below + is_above(position, noise)
    return (code.view(-1) * x.sign()).to(torch.int8), scales


def second_codes(x: Tensor, noise: Tensor | int = NEAREST) -> tuple[Tensor, Tensor]:
    """Return uint8 codes and scales of second moments, flat. `noise`: 16 random bits for each."""
    shares, scales = relative(x)
    root = (shares.sqrt().sqrt_() * SECOND).floor_().clamp_(1, SECOND - 1)
    below, above = (root / SECOND).square_().square_(), ((root + 1) / SECOND).square_().square_()
    code = root - 1 + is_above((shares - below) / (above - below), noise)
    return code.view(-1).to(torch.uint8), scales


def relative(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return magnitudes as shares of their block's largest one, and the largest ones."""
    blocks = x.view(-1, BLOCK)
    scales = blocks.amax(dim=1)
    return blocks / torch.where(scales > 0, scales, 1.0)[:, None], scales


def is_above(position: Tensor, noise: Tensor | int) -> Tensor:
    """Return 1 where a value that lies there between two codes, 0 to 1, is rounded up."""
    if isinstance(noise, Tensor):
        noise = noise.view(-1, BLOCK)
    return ((position * 65536 + 0.5).floor_() > noise).float()
