"""Head and loss as one operation (kernels/cross_entropy.py): where it is, and how its tokens are cut into chunks."""

from __future__ import annotations

from dtrain.kernels import CHUNK_ELEMENTS
from dtrain.plan.layout import Layout
from dtrain.plan.shape import Transformer


def fuses_loss(shape: Transformer, layout: Layout) -> bool:
    """Are logits never whole? Those of a few classes are."""
    return layout.fused_loss and shape.task != "classify"


def chunk_rows(tokens: int, rows: int) -> int:
    """Tokens of one chunk, for a head of so many rows."""
    chunks = max(1, -(-tokens * rows // CHUNK_ELEMENTS))
    return min(tokens, max(1, -(-tokens // chunks // 128)) * 128)
