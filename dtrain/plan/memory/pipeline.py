"""Pipelines: which stages a rank holds, how many passes wait there for their backward pass, and its mailboxes."""

from __future__ import annotations

from dtrain.plan.activations import stream_bytes
from dtrain.plan.counts import Stage, stages
from dtrain.plan.layout import Layout
from dtrain.plan.shape import Transformer
from dtrain.strategies.rules import stages_of_rank


def rank_stages(shape: Transformer, layout: Layout, rank: int) -> tuple[tuple[Stage, ...], int]:
    """The stages of a pipeline rank, and how many passes through one of them wait for their backward pass."""
    if layout.pp == 1:
        return stages(shape, 1, layout.tp, layout.loss_parallel), 1
    ids, count = stages_of_rank(rank, layout.pp, layout.schedule, layout.stages_per_rank)
    cut = stages(shape, count, layout.tp, layout.loss_parallel)
    return tuple(cut[i] for i in ids), in_flight(layout, rank)


def in_flight(layout: Layout, rank: int) -> int:
    """Forward passes through a stage of this rank whose backward pass has not been, at most (torch's schedules)."""
    passes, pp, local = layout.micro_batches, layout.pp, layout.stages_per_rank
    if layout.schedule == "gpipe":
        return passes
    if layout.schedule == "zbv":
        return 2 * min(passes, pp)
    if layout.schedule == "interleaved_1f1b":
        per_round = passes // max(1, passes // pp)
        return min((local - 1) * per_round + 2 * (pp - 1 - rank) + 1, passes * local)
    return min(passes, pp - rank)


def mailbox_bytes(shape: Transformer, layout: Layout, cut: tuple[Stage, ...], tokens: int) -> float:
    """Room that torch's pipeline takes at once for what every micro-batch will send: inputs, and gradients of results.

    Of the residual stream's type.
    """
    one = (
        layout.micro_batches
        * tokens
        * stream_bytes(layout)
        * shape.dim
        / (layout.tp if layout.sequence_parallel else 1)
    )
    return one * sum((not stage.is_first) + (not stage.is_last) for stage in cut)
