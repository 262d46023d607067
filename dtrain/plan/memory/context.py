"""What attention over parts of a sequence (strategy.cp) holds for a moment: other ranks' keys, values and gradients."""

from __future__ import annotations

from dtrain.plan.layout import Layout
from dtrain.plan.ledger import Item
from dtrain.plan.memory.activations import WIDE, product_bytes
from dtrain.plan.model_shape import Transformer


def context_items(shape: Transformer, layout: Layout, tokens: int) -> list[Item]:
    """Buffers of one layer's backward pass, for this rank's tokens: counted in comm/context.py, not measured.

    ring: keys and values here and arriving; their gradients found, being sent and arriving in fp32. allgather: keys and
    values of all ranks, and the gradients of all of them in fp32. ulysses: what is sent and received of one tensor.
    Both of the first also have the gradient of the queries in fp32, and its next addend.
    """
    if layout.cp == 1:
        return []
    e, cp = product_bytes(layout.precision), layout.cp
    keys, queries = 2 * shape.kv_dim / layout.tp, shape.dim / layout.tp
    each = {
        "ring": 2 * keys * e + 3 * keys * WIDE + 2 * queries * WIDE,
        "allgather": cp * keys * e + (cp + 1) * keys * WIDE + 2 * queries * WIDE,
        "ulysses": 2 * queries * e,
    }[layout.cp_kind]
    formula = "{:,} tokens × {:,.0f} bytes, {} over {} ranks"
    return [
        Item("buffers", "keys and values of other ranks", tokens * each, formula, (tokens, each, layout.cp_kind, cp))
    ]
