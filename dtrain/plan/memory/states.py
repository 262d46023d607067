"""Bytes of weights, gradients and optimizer state on one rank, for each way in which data ranks shard them.

ddp and fairscale keep fp32 weights, and autocast makes 16-bit copies; fsdp keeps fp32 shards and gathers layers in 16
bits; DeepSpeed's ZeRO keeps 16-bit weights and fp32 master weights, which belong to the optimizer. Under
precision=bf16-pure, weights, gradients and moments are in 16 bits, without copies.
"""

from __future__ import annotations

from dataclasses import dataclass

from dtrain.kernels import INT8_BYTES
from dtrain.plan.layout import SERVED, Layout
from dtrain.plan.memory.activations import WIDE, product_bytes
from dtrain.plan.model_shape import Convolutions, Shape, Transformer
from dtrain.plan.parameters import Stage, compressed, factored, has_tied_copy, held_parameters, parts, stages

# DeepSpeed's own limits for stage 3, which dtrain does not change: elements that stay gathered because they are used
# again soon, and elements updated at a time (stage3_max_live_parameters, sub_group_size).
MAX_LIVE = 1_000_000_000
SUB_GROUP = 1_000_000_000


@dataclass(frozen=True)
class HeldParameters:
    """Parameters of one rank (a tensor-parallel shard of its pipeline stages), before data ranks shard them."""

    parameters: int
    trained: int
    frozen16: int  # frozen beside adapters, in the matmul's dtype
    ends: int  # outside the blocks: fsdp gathers them as one unit, for the whole pass
    head: int  # of `ends`, the head's matrix
    embed: int  # of `ends`, the token embedding table
    block: int  # one block, with adapters
    largest: int  # the largest trained weight
    uncut: int = 0  # embedding rows of other tp ranks, whose gradient is here until it is sharded
    twin: int = 0  # embedding also held by another pipeline rank, which sends its gradient
    factored: int = 0  # elements of Adafactor's state
    compressed: int = 0  # trained ones whose moments are in bf16 or int8 under optim.state


def held_whole(shape: Shape, layout: Layout) -> HeldParameters:
    """What a rank holds without a pipeline."""
    if isinstance(shape, Transformer):
        return held_by(shape, layout, stages(shape, 1, layout.tp, layout.loss_parallel))
    return held_convolutions(shape, layout)


def held_convolutions(shape: Convolutions, layout: Layout) -> HeldParameters:
    count = held_parameters(shape)
    largest = max(layer.parameters for layer in shape.layers)
    state = {"factored": factored(shape, ()), "compressed": compressed(shape, (), layout.state)}
    return HeldParameters(count, count, 0, 0, 0, 0, largest, count, **state)


def held_by(shape: Transformer, layout: Layout, cut: tuple[Stage, ...]) -> HeldParameters:
    """What a rank with these stages holds."""
    p = parts(shape, layout.tp, layout.loss_parallel)
    everything, ends = sum(stage.parameters for stage in cut), sum(stage.ends for stage in cut)
    first, last = any(stage.is_first for stage in cut), any(stage.is_last for stage in cut)
    tied = has_tied_copy(shape)
    head = (p.embed if tied else p.head) if last else 0
    trained, frozen = everything, 0
    if shape.lora_rank:
        own_head = p.head if shape.task == "classify" and last else 0
        untied = p.head if last and not tied and not own_head else 0
        trained = sum(stage.adapters for stage in cut) + own_head
        frozen = sum(stage.blocks for stage in cut) + untied
    block = max((stage.blocks + stage.adapters) // max(stage.layers, 1) for stage in cut)
    embed = p.embed if first else 0
    widest = shape.dim * shape.hidden_dim // layout.tp
    largest = max(embed, head, widest) if not shape.lora_rank else shape.lora_rank * shape.hidden_dim
    uncut = twin = 0
    if not shape.lora_rank:
        # A row-sharded table that is only looked up: DTensor returns its full gradient on every rank, until
        # tensor.finish_sums. Not if the same table is the head, whose gradient is sharded.
        looked_up = any(stage.is_first and not (stage.is_last and tied) for stage in cut)
        uncut = parts(shape).embed - p.embed if looked_up else 0
        twin = p.embed if tied and first != last else 0
    few = compressed(shape, cut, layout.state, layout.tp, layout.loss_parallel)
    state = factored(shape, cut)
    return HeldParameters(everything, trained, frozen, ends, head, embed, block, largest, uncut, twin, state, few)


@dataclass(frozen=True)
class Sharing:
    """By how many data ranks each kind of state is divided, and by which mechanism."""

    weights: int
    gradients: int
    optimizer: int
    gathers: bool  # FSDP2: fp32 shards, layers gathered in the matmul's dtype
    zero: int  # DeepSpeed's stage, or 0


def sharing(layout: Layout) -> Sharing:
    """fsdp also handles the data ranks of tensor and pipeline layouts; there data=ddp means groups of one rank."""
    dp, data = layout.token_ranks, layout.data
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
    return Sharing(1, 1, dp if data in ("oss", *SERVED) else 1, False, 0)


def is_pure(layout: Layout) -> bool:
    return layout.precision == "bf16-pure"


def state_bytes(layout: Layout) -> int:
    """Bytes of an element of weights, gradients and moments."""
    return 2 if is_pure(layout) else WIDE


def moment_bytes(layout: Layout) -> float:
    """Bytes of an element of one of AdamW's moments, where it is compressed."""
    return {"bf16": 2.0, "int8": INT8_BYTES, "fp32": float(WIDE)}.get(layout.state) or state_bytes(layout)


def weight_bytes(held: HeldParameters, layout: Layout) -> float:
    """fp32; 16 bits for weights frozen beside adapters, and under ZeRO."""
    share, e = sharing(layout), product_bytes(layout.precision)
    if share.zero:
        return e * held.parameters / share.weights
    return (state_bytes(layout) * (held.parameters - held.frozen16) + e * held.frozen16) / share.weights


def optimizer_bytes(held: HeldParameters, layout: Layout) -> float:
    """AdamW's two moments, SGD's momentum, Adafactor's factors, and ZeRO's master weights; fp32 except in bf16-pure.

    fairscale and ps assign whole weights to ranks: a rank has at least the largest one's state. A server that updates
    at any time has its own copy of the weights.
    """
    share = sharing(layout)
    each = layout.moments * state_bytes(layout)
    if layout.state:
        each += 2 * (WIDE - state_bytes(layout))
    if share.zero:
        each += WIDE  # master weights, which DeepSpeed keeps for fp32 weights too
    if layout.data in ("async", "bounded"):
        each += WIDE
    mine = held.trained / share.optimizer
    second = 0.0  # AdamW's second moment of what Muon does not orthogonalize: mostly embeddings and the head
    if layout.optimizer == "muon":
        second = state_bytes(layout) * min(held.ends, held.trained) / share.optimizer
    if layout.optimizer == "adafactor":  # the factors are whole on every rank that has a part of the weight
        second = WIDE * held.factored
    if layout.data in ("oss", "sharded_ddp", *SERVED):
        mine = max(mine, min(held.largest, held.trained))
    saved = 2 * (WIDE - moment_bytes(layout)) * held.compressed / max(held.trained, 1)  # on average
    return (each - saved) * mine + second


def outer_bytes(held: HeldParameters, layout: Layout) -> float:
    """diloco's outer weights and their momentum; one rank has none."""
    return 2.0 * WIDE * held.trained if layout.strategy == "diloco" and layout.token_ranks > 1 else 0.0


def gradient_bytes(held: HeldParameters, layout: Layout) -> float:
    """Gradient bytes that remain after the backward pass."""
    return state_bytes(layout) * held.trained / sharing(layout).gradients


def cut_in_every_pass(layout: Layout) -> bool:
    """Does FSDP2 shard gradients in each pass? Under grad_op and in a pipeline, full ones wait for the last pass.

    tensor with data=ddp shards too, over groups of one rank: only the all-reduce over these groups waits.
    """
    return sharing(layout).gathers and layout.data != "grad_op" and layout.pp == 1


def resident_gradients(held: HeldParameters, layout: Layout) -> tuple[float, str]:
    """Bytes of gradients that exist while a micro-batch's loss is computed, and why.

    DDP's buckets exist; zero1 frees its sums only when the next ones arrive; zero3 has one permanent buffer. With
    gradient accumulation all gradients exist: sharded, or full if they are sharded only after the last pass.
    """
    share, several = sharing(layout), layout.micro_batches > 1
    each = state_bytes(layout)
    whole = each * (held.trained + held.uncut)
    if share.zero == 1:
        e = product_bytes(layout.precision)
        return whole + (e * held.trained if several and e != WIDE else 0), "of the step before, or of earlier passes"
    if share.zero == 3:
        return whole / share.gradients, "one permanent buffer"
    if several or layout.pp > 1:
        cut = share.zero == 2 or cut_in_every_pass(layout)
        return (each * held.trained / share.gradients if cut else whole), "of earlier passes"
    if layout.token_ranks > 1 and layout.strategy in ("ddp", "horovod", "fairscale") and layout.data in ("ddp", "oss"):
        return whole, "stored in the buckets"
    return 0.0, ""
