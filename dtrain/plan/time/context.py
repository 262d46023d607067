"""Communication inside attention over parts of a sequence (strategy.cp); computed, not measured."""

from __future__ import annotations

from dtrain.config.hardware import Hardware
from dtrain.plan.layout import Layout
from dtrain.plan.ledger import Item
from dtrain.plan.model_shape import Transformer
from dtrain.plan.time.collectives import Group, collective_s, hop_s, rate, send_s, start_s
from dtrain.plan.time.compute import HALF, Pass
from dtrain.plan.time.data_parallel import exposed

WIDE = 4  # bytes of an element of a gradient that is being summed


def sent_bytes(shape: Transformer, layout: Layout) -> tuple[float, float]:
    """(forward, backward) bytes that a rank sends in one layer and pass.

    S: bytes of its keys and values, in the matmuls' dtype; S': of their gradients, in fp32. ring: (cp - 1) S forward,
    (cp - 1) S + cp S' backward. allgather: (cp - 1) S forward, (cp - 1) (S + S') backward. ulysses: (cp - 1) / cp of
    queries, keys, values and the output, in both directions.
    """
    elements = layout.micro_batch_size * shape.seq_len / layout.cp
    e, cp = (4 if layout.precision == "fp32" else HALF), layout.cp
    pair = elements * 2 * shape.kv_dim / layout.tp
    if layout.cp_kind == "ulysses":
        exchanged = (cp - 1) / cp * (pair + 2 * elements * shape.dim / layout.tp) * e
        return exchanged, exchanged
    times = cp if layout.cp_kind == "ring" else cp - 1
    return (cp - 1) * pair * e, (cp - 1) * pair * e + times * pair * WIDE


def context_items(
    shape: Transformer, layout: Layout, hardware: Hardware, work: tuple[Pass, Pass], again: float
) -> list[Item]:
    """Seconds that the exchanges of all layers add to a step. `work`: of a block; `again`: its share recomputed."""
    cp, kind = layout.cp, layout.cp_kind
    room = max(1, (hardware.gpus_per_node or cp) // layout.tp)
    group = Group(cp, min(cp, room))
    forward, backward = sent_bytes(shape, layout)
    if kind == "ring":  # each send/recv runs while a block of attention is computed
        crosses = group.nodes > 1
        there = (cp - 1) * send_s(hardware, forward / (cp - 1), crosses)
        back = (cp - 1) * send_s(hardware, backward / (cp - 1), crosses)
        there, back = exposed(hardware, there, work[0].attention), exposed(hardware, back, work[1].attention)
    elif kind == "allgather":
        whole = forward * cp / (cp - 1)
        there = collective_s(hardware, "all_gather", group, whole)
        back = there + collective_s(hardware, "reduce_scatter", group, (backward - forward) * cp / (cp - 1))
    else:  # four all-to-alls: queries, keys, values, output
        there = back = 4 * (start_s(hardware) + (cp - 1) * hop_s(hardware, group)) + forward / rate(
            hardware, "all_gather", group
        )
    layers = -(-shape.num_layers // layout.pp)
    times = layout.micro_batches * layers
    formula = "{} layers and passes × (forward {:.3g} bytes, {:.3f} ms; backward {:.3g} bytes, {:.3f} ms), {} over {}"
    numbers = (times, forward, there * (1 + again) * 1e3, backward, back * 1e3, kind, cp)
    added = times * (there * (1 + again) + back)
    return [Item("communication", "attention over parts of sequences", added, formula, numbers)]
