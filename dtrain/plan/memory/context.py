"""What attention over parts of a sequence (strategy.cp) holds besides the activations of a rank's own tokens.

Counted in comm/context.py and kernels/block_attention.py; the scores were measured on a CPU, the rest was not measured.
"""

from __future__ import annotations

from dtrain.kernels import score_rows
from dtrain.plan.layout import Layout
from dtrain.plan.ledger import Item
from dtrain.plan.memory.activations import WIDE, product_bytes
from dtrain.plan.model_shape import Transformer


def context_items(shape: Transformer, layout: Layout, tokens: int) -> list[Item]:
    """Buffers of one layer's backward pass, for this rank's tokens.

    ring: keys and values here and arriving; their gradients computed, being sent and arriving in fp32. allgather: keys
    and values of all ranks, and the gradients of all of them in fp32. Both also have the gradient of the queries in
    fp32 and its next addend, and what the kernel returns in 16 bits. ulysses: what is sent and received of one tensor.
    """
    if layout.cp == 1:
        return []
    e, cp = product_bytes(layout.precision), layout.cp
    keys, queries = 2 * shape.kv_dim / layout.tp, shape.dim / layout.tp
    returned = 0 if is_plain(shape, layout) else (keys + queries) * e
    each = {
        "ring": 2 * keys * e + 3 * keys * WIDE + 2 * queries * WIDE + returned,
        "allgather": cp * keys * e + (cp + 1) * keys * WIDE + 2 * queries * WIDE + returned,
        "ulysses": 2 * queries * e,
    }[layout.cp_kind]
    formula = "{:,} tokens × {:,.0f} bytes, {} over {} ranks"
    items = [
        Item("buffers", "keys and values of other ranks", tokens * each, formula, (tokens, each, layout.cp_kind, cp))
    ]
    return items + score_items(shape, layout, tokens)


def is_plain(shape: Transformer, layout: Layout) -> bool:
    """Has a block of ring or allgather no kernel, as with documents and in fp32? (Older GPUs: not known here.)"""
    return shape.packed or product_bytes(layout.precision) == WIDE


def score_items(shape: Transformer, layout: Layout, tokens: int) -> list[Item]:
    """Without a kernel: scores of some queries and their gradient.

    Beside them are an addend of the gradient of keys or values and, in 16 bits, keys and values in fp32.
    """
    if layout.cp_kind == "ulysses" or not is_plain(shape, layout):
        return []
    heads, keys = layout.micro_batch_size * shape.num_heads // layout.tp, shape.seq_len // layout.cp
    rows = min(score_rows(heads, keys), keys)
    scores, copies = 2 * WIDE * heads * rows * keys, 1 if product_bytes(layout.precision) == WIDE else 3
    beside = tokens * shape.kv_dim // layout.tp * WIDE * copies
    formula = "2 × {:,} heads × {:,} queries × {:,} keys × 4 bytes, and {:,}"
    return [Item("buffers", "scores of some queries", float(scores + beside), formula, (heads, rows, keys, beside))]


def mask_items(shape: Transformer, layout: Layout, waiting: int) -> list[Item]:
    """The mask of packed documents under ulysses, over whole sequences: one for all layers of each pass in flight.

    In 16 bits there is a kernel without a mask (kernels/document_attention.py).
    """
    e = product_bytes(layout.precision)
    if layout.cp == 1 or layout.cp_kind != "ulysses" or not shape.packed or (e != WIDE and not shape.dropout):
        return []
    value = waiting * layout.micro_batch_size * shape.seq_len**2 * e
    numbers = (waiting, layout.micro_batch_size, shape.seq_len, e)
    return [Item("activations", "mask of documents", float(value), "{} passes × {} × {:,}² × {} bytes", numbers)]
