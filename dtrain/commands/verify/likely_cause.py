"""Words for the usual patterns of a wrong gradient, from its ratio to the right one."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

NEAR = 0.02  # of a ratio


def likely_cause(a: Tensor, b: Tensor, size: int) -> str:
    """Return by which factor `a` differs from `b`, if by one, and what makes such a factor, after a colon; or ""."""
    if a.shape != b.shape or not float(b.norm()):
        return ""
    if not float(a.norm()):
        return ": it is 0"
    ratio = float((a * b).sum() / b.square().sum())
    if abs(ratio - 1) < NEAR or float((a - ratio * b).norm()) > 1e-2 * float(a.norm()):
        return ""
    return f": {of_ratio(ratio, size)}"


def of_ratio(ratio: float, size: int) -> str:
    """Say what a gradient that is `ratio` times the right one usually means."""
    text = f"it is {ratio:.3g} times as large"
    if size > 1 and abs(ratio / size - 1) < NEAR:
        return f"{text}, as if summed over the {size} ranks, not averaged"
    if size > 1 and abs(ratio * size - 1) < NEAR:
        return f"{text}, as if averaged twice over the {size} ranks"
    return text
