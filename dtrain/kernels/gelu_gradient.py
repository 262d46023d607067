"""The kernel of gelu.py: the gradient through GELU, and its sums over strips of rows, in one pass over both inputs.

It is memory-bound: two 16-bit values are read and one written per element. A program processes a strip of rows and 128
columns, moves down the rows, and keeps the columns' sums in registers.
"""

from __future__ import annotations

from typing import Any

import torch
import triton  # type: ignore[import-not-found, unused-ignore]
import triton.language as tl  # type: ignore[import-not-found, unused-ignore]
from torch import Tensor

from dtrain.kernels import CUBIC, SCALE, STRIP

# tile of a program: 32768 × 3072 take 171 µs on an H200 in strips of 128 rows, 175 in strips of 512; 144 at 4.2 TB/s
ROWS, COLUMNS, WARPS = 4, 128, 4


@triton.jit
def gelu_gradient(  # type: ignore[no-untyped-def]
    gradients, inputs, outputs, sums, rows, columns,
    SCALE: tl.constexpr, CUBIC: tl.constexpr, BY_TANH: tl.constexpr,
    STRIP: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    strip = tl.program_id(1)
    row = tl.arange(0, ROWS)
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    rows -= strip * STRIP  # rows from here on
    first = strip.to(tl.int64) * STRIP * columns
    gradients, inputs, outputs = gradients + first, inputs + first, outputs + first
    place = row[:, None] * columns + column[None, :]
    # reduced over rows only once, after the loop: each reduction synchronizes all warps through shared memory
    totals = tl.zeros((ROWS, COLUMNS), tl.float32)
    for start in range(0, STRIP, ROWS):
        inside = (start + row < rows)[:, None] & (column < columns)[None, :]
        x = tl.load(inputs + place, mask=inside, other=0.0).to(tl.float32)
        gradient = tl.load(gradients + place, mask=inside, other=0.0).to(tl.float32)
        if BY_TANH:  # x sigmoid(u), u = SCALE x + CUBIC x³
            share = tl.sigmoid(x * (SCALE + CUBIC * x * x))
            slope = share + x * share * (1.0 - share) * (SCALE + 3.0 * CUBIC * x * x)
        else:  # x times the normal CDF of x
            share = 0.5 + 0.5 * tl.erf(x * 0.7071067811865476)
            slope = share + x * 0.3989422804014327 * tl.exp(-0.5 * x * x)
        gradient *= slope
        tl.store(outputs + place, gradient, mask=inside)
        totals += gradient
        place += ROWS * columns
    tl.store(sums + strip * columns + column, tl.sum(totals, 0), mask=column < columns)


def launch(gradient: Tensor, x: Tensor, by_tanh: bool) -> tuple[Tensor, Tensor]:
    rows, columns = x.shape
    strips = triton.cdiv(rows, STRIP)
    out, sums = torch.empty_like(x), x.new_empty(strips, columns, dtype=torch.float32)
    kernel: Any = gelu_gradient[(triton.cdiv(columns, COLUMNS), strips)]
    kernel(
        gradient, x, out, sums, rows, columns, SCALE=SCALE, CUBIC=CUBIC, BY_TANH=by_tanh, STRIP=STRIP, ROWS=ROWS,
        COLUMNS=COLUMNS, num_warps=WARPS,
    )  # fmt: skip
    return out, sums
