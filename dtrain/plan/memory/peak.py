"""Bytes on the fullest rank at the worst moment of a step: what torch.cuda.max_memory_allocated will say.

Weights and optimizer state are always there. What comes and goes has its worst moment at one of six, and `memory`
gives the items of that one:

- scores: the forward pass computes the loss: all activations, the logits in three copies;
- loss: the backward pass begins: all activations, the log-softmax and two gradients of it;
- blocks: it has come to the last block: all activations, the block's own gradients, or what is computed again;
- first: it has come to the first block: nearly all gradients, and the block's own;
- ends: it has come to the embedding: all gradients and one more of the table;
- update: all gradients, the optimizer's temporaries, no activations.

Between two of them activations leave as gradients come, evenly, so the middle is never the worst. `reserve` says what
a GPU must have beside. Figures "measured" are those of benchmarks/results/planner-h200.json (torch 2.11).
"""

from __future__ import annotations

from dtrain.plan import moments
from dtrain.plan.activations import (
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
from dtrain.plan.counts import Stage
from dtrain.plan.layout import Layout
from dtrain.plan.ledger import Item, total
from dtrain.plan.passes import mailbox_bytes, rank_stages
from dtrain.plan.shape import Convolutions, Shape, Transformer
from dtrain.plan.states import Held, held_by, held_convolutions, optimizer_bytes, sharing, weight_bytes

WORKSPACE = 64 * MIB  # cuBLAS's, for the forward and the backward thread; measured before the first case
STATE_ROUNDING = 0.005  # of weights and state: measured 0 to 1.4%, by which block of the allocator each one got


def reserve(layout: Layout, peak: float = 0.0) -> float:
    """Bytes of a GPU that are not for tensors: CUDA's context, NCCL's buffers, holes between allocations.

    Measured outside the allocator: 0.69 GiB, 0.76 with NCCL and fsdp, 1.24 with DeepSpeed, 1.62 with its zero3. What
    NCCL takes among several GPUs was not had here: 1 GiB is assumed. Of the peak, 3% for holes that no tensor fits
    into: assumed, too. The measured rows reserved more than their peak, 13% at the median and 43% at most, with much
    of the card free and torch's default blocks. Near the limit torch gives back blocks that nothing is in, and a
    launched run has expandable_segments, which leave few others (comm/profile.py); how few is not measured yet
    (`benchmarks/planner/measure.py --groups limits` looks for it).
    """
    context = {"zero1": 1.24, "zero2": 1.24, "zero3": 1.62}.get(layout.data, 0.76) * GIB
    return context + (1.0 * GIB if layout.world_size > 1 else 0.0) + 0.03 * peak


def memory(shape: Shape, layout: Layout) -> list[Item]:
    """Bytes of each part at the worst moment on the fullest rank."""
    if isinstance(shape, Convolutions):
        return convolutional(shape, layout)
    ranks: dict[tuple[Stage, ...], int] = {}
    for rank in range(layout.pp):  # of ranks with equal stages the one with the most passes is the fullest
        cut, waiting = rank_stages(shape, layout, rank)
        ranks[cut] = max(waiting, ranks.get(cut, 0))
    return max((of_rank(shape, layout, cut, waiting) for cut, waiting in ranks.items()), key=total)


# ---- a transformer: what is always there, and the six moments -----------------------------------------------


def of_rank(shape: Transformer, layout: Layout, cut: tuple[Stage, ...], waiting: int) -> list[Item]:
    """The items of one rank's worst moment."""
    held = held_by(shape, layout, cut)
    tokens = layout.micro_batch_size * shape.seq_len
    saved = saved_items(shape, layout, cut, waiting, tokens)
    candidates = [
        saved + moments.scores_items(shape, layout, held, cut, tokens, waiting),
        saved + moments.loss_items(shape, layout, held, cut, tokens, waiting),
        saved + moments.block_items(shape, layout, held, tokens, waiting),
        moments.first_items(shape, layout, held, tokens),
        moments.ends_items(shape, layout, held, tokens),
        moments.update_items(layout, held),
    ]
    always = state_items(layout, held) + batch_items(shape, layout, cut, tokens)
    return always + max(candidates, key=total)


def state_items(layout: Layout, held: Held) -> list[Item]:
    """Weights and optimizer state, as far as they are on the GPU, and what is taken once for all steps."""
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
        Item("fragmentation", "rounding of weights and state", STATE_ROUNDING * (weights + state),
             "{} of them", (STATE_ROUNDING,)),
    ]  # fmt: skip
    if share.zero == 3:
        bucket = layout.bucket_mb * MIB
        items.append(Item("buffers", "bucket for gradients", bucket, "{} MiB", (layout.bucket_mb,)))
    return items


def batch_items(shape: Transformer, layout: Layout, cut: tuple[Stage, ...], tokens: int) -> list[Item]:
    """The samples of a whole step, and a pipeline's mailboxes."""
    sample = WIDE * (shape.seq_len - 1) * shape.patch_inputs if shape.kind == "vit" else 16 * shape.seq_len
    samples = layout.micro_batches * layout.micro_batch_size
    items = [Item("buffers", "samples", samples * sample, "{} × {} bytes", (samples, sample))]
    if layout.pp > 1:
        mail = mailbox_bytes(shape, layout, cut, tokens)
        numbers = (layout.micro_batches, tokens)
        items.append(Item("buffers", "mailboxes of the pipeline", mail, "{} micro-batches × {:,} tokens", numbers))
    return items


def saved_items(shape: Transformer, layout: Layout, cut: tuple[Stage, ...], waiting: int, tokens: int) -> list[Item]:
    """What the passes that wait have saved. A rank with several stages: passes of an average one."""
    way = way_of(layout)
    one, rounding = block_bytes(shape, way, tokens)
    kept, again = (sum(pair) / len(cut) for pair in zip(*(kept_layers(s.layers, layout) for s in cut), strict=True))
    only_input = allocated(tokens * stream_bytes(layout) * shape.dim / (layout.tp if layout.sequence_parallel else 1))
    ends = end_bytes(shape, way, tokens, any(s.is_first for s in cut), any(s.is_last for s in cut)) / len(cut)
    items = [
        Item("activations", "saved by blocks", waiting * kept * one, "{} passes × {:g} blocks × {:,} tokens × {:,.0f}",
             (waiting, kept, tokens, one / tokens)),
        Item("activations", "saved at the ends", waiting * ends, "{} passes × {:,.0f}", (waiting, ends)),
        Item("fragmentation", "rounding of activations", waiting * kept * rounding, "{:,.0f} a block", (rounding,)),
    ]  # fmt: skip
    if again:
        numbers = (waiting, again, only_input)
        value = waiting * again * only_input
        items.append(Item("activations", "inputs of blocks", value, "{} passes × {:g} blocks × {:,.0f}", numbers))
    return items


# ---- a convolutional network ---------------------------------------------------------------------------------


def convolutional(shape: Convolutions, layout: Layout) -> list[Item]:
    """The same for convolutions, which only data ranks share: somewhere in the backward pass, or the update."""
    held, share, e = held_convolutions(shape), sharing(layout), product_bytes(layout.precision)
    count = held.parameters
    samples, pictures = layout.micro_batch_size, layout.micro_batch_size * layout.micro_batches
    picture = convolution_bytes(shape, layout)
    images = WIDE * shape.image_size**2 * shape.channels
    backward = [Item("activations", "saved", samples * picture, "{} pictures × {:,.0f}", (samples, picture))]
    if not share.zero and e != WIDE:
        backward.append(Item("buffers", "weights cast to 16 bits", float(e * count), "{:,} × {}", (count, e)))
    always = [*state_items(layout, held), Item("buffers", "pictures", pictures * images, "{} × {}", (pictures, images))]
    candidates = [backward + moments.resident_items(layout, held), moments.update_items(layout, held)]
    return always + max(candidates, key=total)
