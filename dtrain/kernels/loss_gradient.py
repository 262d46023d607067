"""The kernel of cross_entropy.py: compute each row's loss, and replace the row's logits by their gradient.

It is memory-bound: each logit is read once and its gradient written once (the second read of a row hits the cache).
What remains of the arithmetic is two exponentials per element.
"""

from __future__ import annotations

from typing import Any

import triton  # type: ignore[import-not-found, unused-ignore]
import triton.language as tl  # type: ignore[import-not-found, unused-ignore]
from torch import Tensor

BLOCK, WARPS = 4096, 8
IGNORED = tl.constexpr(-100)


@triton.jit
def loss_and_gradient(  # type: ignore[no-untyped-def]
    logits, row_stride, targets, losses, columns, WANTED: tl.constexpr, BLOCK: tl.constexpr
):
    """One program per row: the log-sum-exp by blocks, then softmax minus one at the target."""
    row = tl.program_id(0).to(tl.int64)
    logits += row * row_stride
    target = tl.load(targets + row)
    counts = target != IGNORED
    offsets = tl.arange(0, BLOCK)
    top = float("-inf")
    total = 0.0
    for start in range(0, columns, BLOCK):
        x = tl.load(logits + start + offsets, mask=start + offsets < columns, other=float("-inf")).to(tl.float32)
        higher = tl.maximum(top, tl.max(x, 0))
        total = total * tl.exp(top - higher) + tl.sum(tl.exp(x - higher), 0)
        top = higher
    normal = top + tl.log(total)
    is_column = (target >= 0) & (target < columns)
    right = tl.load(logits + tl.where(is_column, target, 0)).to(tl.float32)
    right = tl.where(is_column, right, float("nan"))
    tl.store(losses + row, tl.where(counts, normal - right, 0.0))
    if WANTED:
        tl.debug_barrier()  # all threads must read `right` before it is overwritten
        for start in range(0, columns, BLOCK):
            here = start + offsets
            x = tl.load(logits + here, mask=here < columns, other=float("-inf")).to(tl.float32)
            gradient = tl.exp(x - normal) - tl.where(here == target, 1.0, 0.0)
            tl.store(logits + here, tl.where(counts, gradient, 0.0), mask=here < columns)


def launch(logits: Tensor, targets: Tensor, losses: Tensor, wanted: bool) -> None:
    kernel: Any = loss_and_gradient[(len(logits),)]
    kernel(logits, logits.stride(0), targets, losses, logits.shape[1], WANTED=wanted, BLOCK=BLOCK, num_warps=WARPS)
