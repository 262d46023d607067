"""Head and loss as one operation (kernels/cross_entropy.py): where it is."""

from __future__ import annotations

from dtrain.plan.layout import Layout
from dtrain.plan.shape import Transformer


def fuses_loss(shape: Transformer, layout: Layout) -> bool:
    """Are logits never whole? Those of a few classes are."""
    return layout.fused_loss and shape.task != "classify"
