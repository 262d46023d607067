"""Pipelines: the stages of a rank, the passes in flight on it, and its receive buffers."""

from __future__ import annotations

from dtrain.plan.layout import Layout
from dtrain.plan.memory.activations import stream_bytes
from dtrain.plan.model_shape import Transformer
from dtrain.plan.parameters import Stage, stages
from dtrain.strategies.stage_layout import stages_of_rank


def rank_stages(shape: Transformer, layout: Layout, rank: int) -> tuple[tuple[Stage, ...], int]:
    """Return the stages of a pipeline rank, and how many passes through one of them wait for their backward pass."""
    if layout.pp == 1:
        return stages(shape, 1, layout.tp, layout.loss_parallel), 1
    ids, count = stages_of_rank(rank, layout.pp, layout.schedule, layout.stages_per_rank)
    cut = stages(shape, count, layout.tp, layout.loss_parallel)
    return tuple(cut[i] for i in ids), in_flight(layout, rank)


def in_flight(layout: Layout, rank: int) -> int:
    """Maximum number of forward passes through a stage of this rank without their backward pass (torch's schedules)."""
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
    """Buffers that torch's pipeline allocates up front to receive every micro-batch: inputs, and gradients of results.

    Their dtype is the residual stream's.
    """
    one = (
        layout.micro_batches
        * tokens
        * stream_bytes(layout)
        * shape.dim
        / (layout.tp if layout.sequence_parallel else 1)
    )
    return one * sum((not stage.is_first) + (not stage.is_last) for stage in cut)
