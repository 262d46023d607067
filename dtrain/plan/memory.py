"""Bytes on the fullest rank at the worst moment of a step: what torch.cuda.max_memory_allocated will say.

A step has three moments that can be the worst, and `memory` gives the items of the one that is:

- loss: the forward pass has ended; all activations, the logits and their gradient are there, few gradients;
- last layer / first layer of the backward pass: activations leave as gradients come, so only the ends count;
- update: all gradients and the optimizer's own temporaries, no activations.

`reserve` says what a GPU must have beside: the driver's context, NCCL's buffers, holes between allocations.
"""

from __future__ import annotations

from dtrain.plan.activations import WIDE, block_bytes, convolution_bytes, kept_layers, product_bytes
from dtrain.plan.counts import Stage, adapters, held_parameters, parts, stages, trained_parameters
from dtrain.plan.layout import Layout
from dtrain.plan.ledger import Item, total
from dtrain.plan.shape import Convolutions, Shape, Transformer
from dtrain.strategies.rules import stages_of_rank

GIB = 2**30


def model_states(
    parameters: float, stage: int, dp: int, weight: float = 2, gradient: float = 2, state: float = 12
) -> float:
    """Bytes of weights, gradients and optimizer state a rank: the table of the ZeRO paper (arXiv:1910.02054, table 1).

    `state` is K = 12: float32 weights, momentum and variance. Stage 1 cuts it over the ranks, stage 2 the gradients,
    too, stage 3 also the weights; stage 0 is plain data parallel.
    """
    weights = weight * parameters / (dp if stage >= 3 else 1)
    gradients = gradient * parameters / (dp if stage >= 2 else 1)
    return weights + gradients + state * parameters / (dp if stage >= 1 else 1)


def reserve(layout: Layout) -> float:
    """Bytes of a GPU that are not for tensors: CUDA's context, NCCL's buffers, and holes between allocations."""
    context = 0.6 * GIB
    nccl = 0.5 * GIB if layout.world_size > 1 else 0.0
    return context + nccl


def memory(shape: Shape, layout: Layout) -> list[Item]:
    """Bytes of each part at the worst moment on the fullest rank."""
    if isinstance(shape, Convolutions):
        return convolutional(shape, layout)
    ranks = {rank_stages(shape, layout, rank) for rank in range(layout.pp)}
    return max((of_rank(shape, layout, *held) for held in ranks), key=total)


def rank_stages(shape: Transformer, layout: Layout, rank: int) -> tuple[tuple[Stage, ...], int]:
    """The stages that a pipeline rank holds, and how many micro-batches of one stage it keeps at a time."""
    per_rank = layout.stages_per_rank if layout.schedule == "interleaved_1f1b" else 1
    ids, count = stages_of_rank(rank, layout.pp, layout.schedule, per_rank) if layout.pp > 1 else ([0], 1)
    cut = stages(shape, count, layout.tp, layout.loss_parallel)
    return tuple(cut[i] for i in ids), in_flight(layout, rank)


def in_flight(layout: Layout, rank: int) -> int:
    """Micro-batches, times stages of a rank, whose activations wait for their backward pass at the same time."""
    m, pp = layout.micro_batches, layout.pp
    if pp == 1:
        return 1
    if layout.schedule == "gpipe":
        return m
    if layout.schedule == "zbv":
        return 2 * min(m, pp)
    if layout.schedule == "interleaved_1f1b":
        local = layout.stages_per_rank
        per_round = m // max(1, m // pp)
        return min((local - 1) * per_round + 2 * (pp - 1 - rank) + 1, m * local)
    return min(m, pp - rank)


# ---- a transformer -------------------------------------------------------------------------------------------


def of_rank(shape: Transformer, layout: Layout, held: tuple[Stage, ...], waiting: int) -> list[Item]:
    """The items of one rank's worst moment."""
    states = model_state_items(shape, layout, held)
    moments = [loss_moment(shape, layout, held, waiting), update_moment(shape, layout, held)]
    return states + max(moments, key=total)


def parameter_counts(shape: Transformer, held: tuple[Stage, ...]) -> tuple[float, float]:
    """(all, trained) on this rank."""
    everything = sum(stage.parameters for stage in held)
    if not shape.lora_rank:
        return everything, everything
    trained = sum(stage.adapters for stage in held)
    if shape.task == "classify":
        trained += sum(parts(shape).head for stage in held if stage.is_last)
    return everything, trained


def cut(layout: Layout) -> dict[str, float]:
    """By how many ranks each kind of state is divided."""
    dp = float(layout.dp)
    shares = {"parameters": 1.0, "gradients": 1.0, "optimizer": 1.0}
    data = layout.data
    if data in ("fsdp", "grad_op", "zero3"):
        shares = dict.fromkeys(shares, dp if layout.replica_size is None else float(layout.replica_size))
    elif data in ("zero2", "sharded_ddp"):
        shares |= {"gradients": dp, "optimizer": dp}
    elif data in ("zero1", "oss"):
        shares |= {"optimizer": dp}
    return shares


def weight_bytes(shape: Transformer, layout: Layout, held: tuple[Stage, ...]) -> float:
    """Bytes of this rank's weights before they are cut over data ranks: float32, but 16 bits where they are frozen
    beside adapters (linear layers only), and under ZeRO, whose masters belong to the optimizer."""
    everything, _ = parameter_counts(shape, held)
    e = product_bytes(layout.precision)
    if layout.data.startswith("zero"):
        return e * everything
    frozen = sum(stage.blocks for stage in held) if shape.lora_rank else 0
    return WIDE * (everything - frozen) + e * frozen


def model_state_items(shape: Transformer, layout: Layout, held: tuple[Stage, ...]) -> list[Item]:
    """What is there at every moment: weights and optimizer state."""
    everything, trained = parameter_counts(shape, held)
    shares, zero = cut(layout), layout.data.startswith("zero")
    weights = weight_bytes(shape, layout, held) / shares["parameters"]
    moments = 8 if layout.optimizer == "adamw" else 4
    if zero:
        moments += WIDE
    offloaded = layout.offload != "none"
    items = []
    if not (offloaded and layout.data in ("fsdp", "grad_op")) and layout.offload_params == "none":
        items.append(
            Item("parameters", "weights", weights, "{} parameters over {}", (everything, shares["parameters"]))
        )
    if not offloaded:
        items.append(
            Item("optimizer", "state", moments * trained / shares["optimizer"], "{} × {} bytes over {}",
                 (trained, moments, shares["optimizer"]))
        )  # fmt: skip
    return items


def gradient_bytes(shape: Transformer, layout: Layout, held: tuple[Stage, ...]) -> float:
    _, trained = parameter_counts(shape, held)
    if layout.offload != "none" and layout.data != "zero1":
        return 0.0
    return WIDE * trained / cut(layout)["gradients"]


def loss_moment(shape: Transformer, layout: Layout, held: tuple[Stage, ...], waiting: int) -> list[Item]:
    """The end of the forward pass: everything saved, the logits with their gradient, and what is gathered."""
    tokens = layout.micro_batch_size * shape.seq_len
    per_block = block_bytes(shape, layout)
    layers = sum(stage.layers for stage in held) / len(held)
    kept, again = kept_layers(round(layers), layout)
    between = layout.tp if layout.sequence_parallel else 1
    saved = tokens * (kept * per_block + again * WIDE * shape.dim / between)
    items = [Item("activations", "blocks", waiting * saved, "{} × {} tokens × {} layers", (waiting, tokens, layers))]
    if again:
        items.append(Item("activations", "one block again", tokens * per_block, "{} tokens × {}", (tokens, per_block)))
    if any(stage.is_last for stage in held):
        items += logit_items(shape, layout, tokens)
    items += buffer_items(shape, layout, held)
    accumulated = layout.micro_batches > 1 or layout.pp > 1 or (layout.dp > 1 and layout.data == "ddp")
    if accumulated:
        items.append(Item("gradients", "accumulated", gradient_bytes(shape, layout, held), "{}", (layout.data,)))
    return items


def logit_items(shape: Transformer, layout: Layout, tokens: float) -> list[Item]:
    """When the backward pass begins: the log-softmax, its gradient and the gradient of the logits, all float32."""
    e = product_bytes(layout.precision)
    asked = tokens * shape.asked
    rows = shape.vocab_size / (layout.tp if layout.loss_parallel else 1)
    copies = e if layout.compile and layout.data == "ddp" else 3 * WIDE
    return [Item("logits", "logits", asked * rows * copies, "{} × {} × {} bytes", (asked, rows, copies))]


def buffer_items(shape: Transformer, layout: Layout, held: tuple[Stage, ...]) -> list[Item]:
    """16-bit copies of weights: all of them under ddp (autocast), gathered layers under fsdp and zero3."""
    e = product_bytes(layout.precision)
    p = parts(shape, layout.tp, layout.loss_parallel)
    everything, _ = parameter_counts(shape, held)
    ends = max(stage.ends for stage in held)
    if layout.data in ("fsdp", "zero3", "grad_op"):
        whole = layout.data == "grad_op" or layout.pp > 1
        gathered = e * (everything if whole else ends + 2 * (p.block + adapters(shape, layout.tp)))
        gathered += 2 * WIDE * p.block
        return [Item("buffers", "gathered layers", gathered, "{} bytes", (gathered,))]
    if layout.data.startswith("zero"):
        return [Item("buffers", "buckets", 2 * layout.bucket_mb * 2**20, "2 × {} MiB", (layout.bucket_mb,))]
    if e == WIDE:
        return []
    return [Item("buffers", "weights in 16 bits", e * everything, "{} × {} bytes", (everything, e))]


def update_moment(shape: Transformer, layout: Layout, held: tuple[Stage, ...]) -> list[Item]:
    """All gradients, and no activations."""
    return [Item("gradients", "gradients", gradient_bytes(shape, layout, held), "{}", (layout.data,))]


# ---- a convolutional network ---------------------------------------------------------------------------------


def convolutional(shape: Convolutions, layout: Layout) -> list[Item]:
    """The same for convolutions, which only data ranks share."""
    count, shares = held_parameters(shape), cut(layout)
    zero, e = layout.data.startswith("zero"), product_bytes(layout.precision)
    moments = (8 if layout.optimizer == "adamw" else 4) + (WIDE if zero else 0)
    weights = (e if zero else WIDE) * count / shares["parameters"]
    everything, largest, recomputed = convolution_bytes(shape, layout)
    saved = everything if layout.activation_checkpointing == "none" else recomputed + largest
    return [
        Item("parameters", "weights", weights, "{} parameters", (count,)),
        Item("optimizer", "state", moments * trained_parameters(shape) / shares["optimizer"], "{}", (count,)),
        Item("gradients", "gradients", WIDE * count / shares["gradients"], "{}", (count,)),
        Item("activations", "saved", layout.micro_batch_size * saved, "{} pictures", (layout.micro_batch_size,)),
    ]
