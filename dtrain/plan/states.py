"""Weights, gradients and optimizer state on one rank, in bytes, under each way in which data ranks share them.

ddp and fairscale keep float32 weights and let autocast make 16-bit copies; fsdp keeps float32 pieces and gathers layers
in 16 bits; DeepSpeed's ZeRO keeps 16-bit weights and float32 masters, which belong to the optimizer.
"""

from __future__ import annotations

from dataclasses import dataclass

from dtrain.plan.activations import WIDE, product_bytes
from dtrain.plan.counts import Stage, parts
from dtrain.plan.layout import Layout
from dtrain.plan.shape import Transformer

# DeepSpeed's own limits for stage 3, which dtrain leaves as they are: elements that stay gathered because they will be
# used again soon, and elements that are updated at a time (stage3_max_live_parameters, sub_group_size).
MAX_LIVE = 1_000_000_000
SUB_GROUP = 1_000_000_000


def model_states(
    parameters: float, stage: int, dp: int, weight: float = 2, gradient: float = 2, state: float = 12
) -> float:
    """Bytes of weights, gradients and optimizer state a rank: the table of the ZeRO paper (arXiv:1910.02054, table 1).

    `state` is the paper's K = 12: float32 weights, momentum and variance. Stage 1 cuts it over the ranks, stage 2 the
    gradients, too, stage 3 also the weights; stage 0 is plain data parallel.
    """
    weights = weight * parameters / (dp if stage >= 3 else 1)
    gradients = gradient * parameters / (dp if stage >= 2 else 1)
    return weights + gradients + state * parameters / (dp if stage >= 1 else 1)


@dataclass(frozen=True)
class Held:
    """Parameters of one rank (a tensor rank's part of its pipeline stages), before data ranks share them."""

    parameters: int
    trained: int
    frozen16: int  # frozen, and held in the product's type beside adapters
    ends: int  # outside the blocks: what fsdp gathers as one unit, for the whole pass
    head: int  # of them, the matrix of the head
    embed: int  # and the table that tokens are looked up in
    block: int  # one block, with adapters
    largest: int  # the largest weight that is trained


def held_by(shape: Transformer, layout: Layout, stages: tuple[Stage, ...]) -> Held:
    p = parts(shape, layout.tp, layout.loss_parallel)
    everything = sum(stage.parameters for stage in stages)
    ends, first, last = (sum(stage.ends for stage in stages), *(any(getattr(s, n) for s in stages) for n in ENDS))
    tied = shape.tied and shape.task != "classify"
    head = (p.embed if tied else p.head) if last else 0
    trained, frozen = everything, 0
    if shape.lora_rank:
        own_head = p.head if shape.task == "classify" and last else 0
        untied = p.head if last and not tied and not own_head else 0
        trained = sum(stage.adapters for stage in stages) + own_head
        frozen = sum(stage.blocks for stage in stages) + untied
    block = max((stage.blocks + stage.adapters) // max(stage.layers, 1) for stage in stages)
    embed = p.embed if first else 0
    widest = shape.dim * shape.hidden_dim // layout.tp
    largest = max(embed, head, widest) if not shape.lora_rank else shape.lora_rank * shape.hidden_dim
    return Held(everything, trained, frozen, ends, head, embed, block, largest)


ENDS = ("is_first", "is_last")


@dataclass(frozen=True)
class Sharing:
    """By how many data ranks each kind of state is divided, and by which machinery."""

    weights: int
    gradients: int
    optimizer: int
    gathers: bool  # FSDP2: float32 pieces, layers gathered in the product's type
    zero: int  # DeepSpeed's stage, or 0


def sharing(layout: Layout) -> Sharing:
    """fsdp also carries the data ranks of tensor and pipeline layouts; there data=ddp means groups of one rank."""
    dp, data = layout.dp, layout.data
    if data in ("zero1", "zero2", "zero3"):
        stage = int(data[-1])
        return Sharing(dp if stage == 3 else 1, dp if stage >= 2 else 1, dp, False, stage)
    if layout.strategy in ("tensor", "pipeline", "3d"):
        share = dp if data == "fsdp" else 1
        return Sharing(share, share, share, dp > 1, 0)
    if data in ("fsdp", "grad_op"):
        share = layout.replica_size or dp
        return Sharing(share, share, share, True, 0)
    if data == "sharded_ddp":
        return Sharing(1, dp, dp, False, 0)
    return Sharing(1, 1, dp if data == "oss" else 1, False, 0)


def weight_bytes(held: Held, layout: Layout) -> float:
    """Float32; 16 bits where they are frozen beside adapters, and under ZeRO."""
    share, e = sharing(layout), product_bytes(layout.precision)
    if share.zero:
        return e * held.parameters / share.weights
    return (WIDE * (held.parameters - held.frozen16) + e * held.frozen16) / share.weights


def optimizer_bytes(held: Held, layout: Layout) -> float:
    """AdamW's two moments, SGD's one, and ZeRO's masters, all float32.

    fairscale deals out whole weights: a rank has at least the largest one's state.
    """
    share = sharing(layout)
    each = (2 if layout.optimizer == "adamw" else 1) * WIDE
    if share.zero and layout.precision != "fp32":
        each += WIDE
    elif share.zero:
        each += WIDE  # DeepSpeed clones its masters in float32, too
    mine = held.trained / share.optimizer
    if layout.data in ("oss", "sharded_ddp"):
        mine = max(mine, min(held.largest, held.trained))
    return each * mine


def gradient_bytes(held: Held, layout: Layout) -> float:
    """What is left of the gradients when the backward pass has ended."""
    return WIDE * held.trained / sharing(layout).gradients


def cut_in_every_pass(layout: Layout) -> bool:
    """Does fsdp share gradients after each pass? Not where whole weights stay for a step: grad_op, a pipeline."""
    return layout.data == "fsdp" and layout.pp == 1


def resident_gradients(held: Held, layout: Layout) -> tuple[float, str]:
    """Gradients that are there when a micro-batch's loss is computed, and why.

    DDP's buckets are; zero1 frees its sums only when the next ones come, zero3 has them in one buffer for good. A pass
    that only adds to the ones before finds all of them: cut, or whole where they are cut after the last pass.
    """
    share, several = sharing(layout), layout.micro_batches > 1
    whole = WIDE * held.trained
    if share.zero == 1:
        e = product_bytes(layout.precision)
        return whole + (e * held.trained if several and e != WIDE else 0), "of the step before, or of earlier passes"
    if share.zero == 3:
        return whole / share.gradients, "one buffer for good"
    if several or layout.pp > 1:
        cut = share.zero == 2 or cut_in_every_pass(layout)
        return (whole / share.gradients if cut else whole), "of earlier passes"
    if layout.dp > 1 and layout.strategy in ("ddp", "fairscale") and layout.data in ("ddp", "oss"):
        return whole, "they live in the buckets"
    return 0.0, ""
