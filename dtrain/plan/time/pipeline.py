"""What a pipeline adds to a step: idle ranks, and send/recv between stages."""

from __future__ import annotations

from dtrain.config.hardware import Hardware
from dtrain.plan.layout import Layout
from dtrain.plan.ledger import Item
from dtrain.plan.model_shape import Shape, Transformer
from dtrain.plan.parameters import has_tied_copy, parts
from dtrain.plan.time.collectives import Group, collective_s, send_s
from dtrain.plan.time.stack import Stack


def bubble_share(layout: Layout) -> float:
    """The share of the bubble that the schedule cannot fill.

    zbv fills it with weight gradients, a third of a pass each, if there are at least two micro-batches per rank (arXiv
    2401.10241); with one, there is nothing to fill it with. The remaining third is assumed, not measured.
    """
    if layout.schedule != "zbv":
        return 1.0
    return 1 / 3 + 2 / 3 * max(0.0, 1 - (layout.micro_batches - 1) / (2 * layout.pp - 1))


def bubble_passes(layout: Layout) -> float:
    """Passes for which the slowest rank is idle.

    With fewer micro-batches than ranks, the first one's way through all stages dominates.
    """
    cuts = layout.stages_per_rank
    return (layout.pp - 1) / cuts + (1 - 1 / cuts) * max(0, layout.pp - layout.micro_batches)


def pipeline_items(shape: Shape, layout: Layout, hardware: Hardware, stack: Stack, others_s: float) -> list[Item]:
    """The bubble, and send/recv between stages; `others_s`: busy seconds of all ranks but the slowest in a step.

    The slowest rank is busy for all its passes, and idle while the first pass goes through the others, forward and
    backward: (pp - 1) passes, of which interleaved stages are only a part each (arXiv 2104.04473, section 2.2, for
    equal ranks). The others' passes are shorter than its own if it has the head.
    """
    assert isinstance(shape, Transformer)
    one, idle = others_s / (layout.pp - 1) / layout.micro_batches, bubble_passes(layout)
    bubble = bubble_share(layout) * idle * one
    crosses = layout.world_size > (hardware.gpus_per_node or layout.world_size)
    num_bytes = layout.micro_batch_size * shape.seq_len // layout.cp * shape.dim * stack.stream
    if layout.sequence_parallel:  # each tensor rank has a part of the sequence
        send = send_s(hardware, num_bytes / layout.tp, crosses)
    elif stack.sharded_head and layout.tp > 1:  # each tensor rank sends its part; the receivers all-gather
        send = send_s(hardware, num_bytes / layout.tp, crosses)
        send += collective_s(hardware, "all_gather", Group(layout.tp, layout.tp), num_bytes)
    else:
        send = send_s(hardware, num_bytes, crosses)
    sends = 2 * layout.stages_per_rank * layout.micro_batches
    formula = "{:.2f} × {:.2f} passes × {:.3f} ms, of {} ranks"
    return [
        Item(
            "bubble", "pipeline bubble", bubble, formula,
            (bubble_share(layout), idle, one * 1e3, layout.pp),
        ),
        Item("communication", "between stages", sends * send, "{} send/recv × {:.3f} ms", (sends, send * 1e3)),
        *tied_items(shape, layout, hardware, crosses),
    ]  # fmt: skip


def tied_items(shape: Transformer, layout: Layout, hardware: Hardware, crosses: bool) -> list[Item]:
    """Once per step, the first and the last stage sum their gradients of the tied embedding."""
    if not has_tied_copy(shape):
        return []
    table = parts(shape, layout.tp, layout.loss_parallel).embed
    formula = "{:,} × 4 bytes, there and back"
    return [Item("communication", "tied embedding", 2 * send_s(hardware, table * 4.0, crosses), formula, (table,))]
