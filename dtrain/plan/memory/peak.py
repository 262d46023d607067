"""Bytes on the fullest rank at the peak of a step: what torch.cuda.max_memory_allocated will report.

Weights and optimizer state are always there. Everything else peaks at one of six phases, and `memory` returns the
items of the worst one:

- scores: the forward pass computes the loss: all activations, the logits in three copies;
- loss: the backward pass starts: all activations, the log-softmax and two of its gradients;
- blocks: it reaches the last block: all activations, the block's own gradients, or its recomputed tensors;
- first: it reaches the first block: nearly all gradients, and the block's own;
- ends: it reaches the embedding: all gradients and one more for the table;
- update: all gradients, the optimizer's temporaries, no activations.

Between two phases activations are freed evenly as gradients appear, so the peak is never in between. `reserve` is what
a GPU needs in addition. "Measured" refers to benchmarks/results/planner-h200.json (torch 2.11).
"""

from __future__ import annotations

from dtrain.plan import compression
from dtrain.plan.layout import Layout
from dtrain.plan.ledger import Item, total
from dtrain.plan.memory import phases
from dtrain.plan.memory.activations import (
    GIB,
    MIB,
    WIDE,
    allocated,
    block_bytes,
    convolution_bytes,
    end_bytes,
    kept_layers,
    product_bytes,
    stream_bytes,
    way_of,
)
from dtrain.plan.memory.context import mask_items
from dtrain.plan.memory.pipeline import mailbox_bytes, rank_stages
from dtrain.plan.memory.states import (
    HeldParameters,
    held_by,
    held_convolutions,
    optimizer_bytes,
    outer_bytes,
    sharing,
    weight_bytes,
)
from dtrain.plan.model_shape import Convolutions, Shape, Transformer
from dtrain.plan.parameters import Stage

WORKSPACE = 64 * MIB  # cuBLAS, for the forward and the backward thread; measured before the first case
STATE_ROUNDING = 0.005  # of weights and state: measured 0 to 1.4%, depending on the allocator's blocks


def reserve(layout: Layout, peak: float = 0.0) -> float:
    """Bytes of a GPU that tensors cannot use: CUDA's context, NCCL's buffers, fragmentation.

    Measured outside the allocator: 0.69 GiB, 0.76 with NCCL and fsdp, 1.24 with DeepSpeed, 1.62 with its zero3. NCCL's
    memory for several GPUs was not measured: 1 GiB is assumed. 3% of the peak for fragmentation is also assumed. The
    measured rows reserved more than their peak, 13% at the median and 43% at most, with much of the card free and
    torch's default blocks. Near the limit torch frees empty blocks, and a launched run uses expandable_segments, which
    leave few others (preflight/network_env.py); how few is not measured yet (`benchmarks/planner/measure.py --groups
    limits` looks for it).
    """
    context = {"zero1": 1.24, "zero2": 1.24, "zero3": 1.62}.get(layout.data, 0.76) * GIB
    return context + (1.0 * GIB if layout.world_size > 1 else 0.0) + 0.03 * peak


def memory(shape: Shape, layout: Layout) -> list[Item]:
    """Bytes of each part at the peak on the fullest rank."""
    if isinstance(shape, Convolutions):
        return convolutional(shape, layout)
    ranks: dict[tuple[Stage, ...], int] = {}
    for rank in range(layout.pp):  # among ranks with equal stages, the one with the most passes is the fullest
        cut, waiting = rank_stages(shape, layout, rank)
        ranks[cut] = max(waiting, ranks.get(cut, 0))
    return max((of_rank(shape, layout, cut, waiting) for cut, waiting in ranks.items()), key=total)


# ---- a transformer: permanent memory, and the six phases ----------------------------------------------------


def of_rank(shape: Transformer, layout: Layout, cut: tuple[Stage, ...], waiting: int) -> list[Item]:
    """Return the items of one rank at its peak."""
    held = held_by(shape, layout, cut)
    tokens = layout.micro_batch_size * shape.seq_len // layout.cp
    saved = saved_items(shape, layout, cut, waiting, tokens)
    candidates = [
        saved + phases.scores_items(shape, layout, held, cut, tokens, waiting),
        saved + phases.loss_items(shape, layout, held, cut, tokens, waiting),
        saved + phases.block_items(shape, layout, held, tokens, waiting),
        phases.first_items(shape, layout, held, tokens),
        phases.ends_items(shape, layout, held, tokens),
        phases.update_items(layout, held),
    ]
    always = state_items(layout, held) + error_items(shape, layout) + batch_items(shape, layout, cut, tokens)
    return always + max(candidates, key=total)


def state_items(layout: Layout, held: HeldParameters) -> list[Item]:
    """Weights and optimizer state, if they are on the GPU, and buffers allocated once for all steps."""
    share = sharing(layout)
    weights, state = weight_bytes(held, layout), optimizer_bytes(held, layout)
    away = layout.offload != "none"
    if (away and share.gathers) or layout.offload_params != "none":
        weights = 0.0
    if away:
        state = 0.0
    items = [
        Item("parameters", "weights", weights, "{:,} parameters over {} data ranks", (held.parameters, share.weights)),
        Item("optimizer", "state", state, "{:,} trained ones over {} data ranks", (held.trained, share.optimizer)),
        Item("buffers", "cuBLAS workspace", WORKSPACE, "2 × 32 MiB"),
        Item("fragmentation", "allocator rounding of weights and state", STATE_ROUNDING * (weights + state),
             "{} of them", (STATE_ROUNDING,)),
    ]  # fmt: skip
    if outer := outer_bytes(held, layout):
        items.append(Item("optimizer", "outer weights and momentum", outer, "{:,} × 8 bytes", (held.trained,)))
    if share.zero == 3:
        bucket = layout.bucket_mb * MIB
        items.append(Item("buffers", "bucket for gradients", bucket, "{} MiB", (layout.bucket_mb,)))
    return items


def error_items(shape: Shape, layout: Layout) -> list[Item]:
    """What compression of gradients keeps from step to step."""
    value = compression.state_bytes(shape, layout)
    return [Item("buffers", "errors of compression", value, "compress={}", (layout.compress,))] if value else []


def batch_items(shape: Transformer, layout: Layout, cut: tuple[Stage, ...], tokens: int) -> list[Item]:
    """The samples of a whole step, and a pipeline's receive buffers."""
    sample = WIDE * (shape.seq_len - 1) * shape.patch_inputs if shape.kind == "vit" else 16 * shape.seq_len
    samples = layout.micro_batches * layout.micro_batch_size
    items = [Item("buffers", "samples", samples * sample, "{} × {} bytes", (samples, sample))]
    if layout.pp > 1:
        mail = mailbox_bytes(shape, layout, cut, tokens)
        numbers = (layout.micro_batches, tokens)
        items.append(
            Item("buffers", "receive buffers of the pipeline", mail, "{} micro-batches × {:,} tokens", numbers)
        )
    return items


def saved_items(shape: Transformer, layout: Layout, cut: tuple[Stage, ...], waiting: int, tokens: int) -> list[Item]:
    """Activations saved by the passes in flight. For a rank with several stages: passes of an average stage."""
    way = way_of(layout)
    one, rounding = block_bytes(shape, way, tokens)
    kept, again = (sum(pair) / len(cut) for pair in zip(*(kept_layers(s.layers, layout) for s in cut), strict=True))
    only_input = allocated(tokens * stream_bytes(layout) * shape.dim / (layout.tp if layout.sequence_parallel else 1))
    ends = end_bytes(shape, way, tokens, any(s.is_first for s in cut), any(s.is_last for s in cut)) / len(cut)
    items = [
        Item("activations", "saved by blocks", waiting * kept * one, "{} passes × {:g} blocks × {:,} tokens × {:,.0f}",
             (waiting, kept, tokens, one / tokens)),
        Item("activations", "saved by embedding and head", waiting * ends, "{} passes × {:,.0f}", (waiting, ends)),
        Item("fragmentation", "allocator rounding of activations", waiting * kept * rounding, "{:,.0f} a block",
             (rounding,)),
    ]  # fmt: skip
    if again:
        numbers = (waiting, again, only_input)
        value = waiting * again * only_input
        items.append(Item("activations", "inputs of blocks", value, "{} passes × {:g} blocks × {:,.0f}", numbers))
    return items + mask_items(shape, layout, waiting)


# ---- a convolutional network ---------------------------------------------------------------------------------


def convolutional(shape: Convolutions, layout: Layout) -> list[Item]:
    """Like `of_rank`, for convolutions, which only data ranks shard: peak in the backward pass, or in the update."""
    held, share, e = held_convolutions(shape, layout), sharing(layout), product_bytes(layout.precision)
    count = held.parameters
    samples, pictures = layout.micro_batch_size, layout.micro_batch_size * layout.micro_batches
    picture = convolution_bytes(shape, layout)
    images = WIDE * shape.image_size**2 * shape.channels
    backward = [Item("activations", "saved", samples * picture, "{} images × {:,.0f}", (samples, picture))]
    if not share.zero and e != WIDE:
        backward.append(Item("buffers", "weights cast to 16 bits", float(e * count), "{:,} × {}", (count, e)))
    always = [
        *state_items(layout, held),
        *error_items(shape, layout),
        Item("buffers", "images", pictures * images, "{} × {}", (pictures, images)),
    ]
    candidates = [backward + phases.resident_items(layout, held), phases.update_items(layout, held)]
    return always + max(candidates, key=total)
