"""When head and loss are one operation (kernels/cross_entropy.py)."""

from __future__ import annotations

from dtrain.plan.layout import Layout
from dtrain.plan.model_shape import Transformer


def fuses_loss(shape: Transformer, layout: Layout) -> bool:
    """Are the logits never fully in memory? Not for classifiers, which have few classes."""
    return layout.fused_loss and shape.task != "classify"
