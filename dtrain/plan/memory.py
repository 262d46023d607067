"""Bytes on the fullest rank at the worst moment of a step: what torch.cuda.max_memory_allocated will say.

Weights and optimizer state are always there. What comes and goes has its worst moment at one of five, and `memory`
gives the items of that one:

- scores: the forward pass computes the loss: all activations, the logits in three copies;
- loss: the backward pass begins: all activations, the log-softmax and two gradients of it;
- blocks: it has come to the last block: all activations, the block's own gradients, or what is computed again;
- ends: it has come to the embedding: all gradients and one more of the table;
- update: all gradients, the optimizer's temporaries, no activations.

Between two of them activations leave as gradients come, evenly, so the middle is never the worst. `reserve` says what
a GPU must have beside. Figures "measured" are those of benchmarks/results/planner-h200.json (torch 2.11).
"""

from __future__ import annotations

from dtrain.plan.activations import (
    MIB,
    WIDE,
    allocated,
    block_again_bytes,
    block_bytes,
    convolution_bytes,
    end_bytes,
    kept_layers,
    product_bytes,
    way_of,
)
from dtrain.plan.counts import Stage, held_parameters
from dtrain.plan.layout import Layout
from dtrain.plan.ledger import Item, total
from dtrain.plan.passes import mailbox_bytes, rank_stages
from dtrain.plan.shape import Convolutions, Shape, Transformer
from dtrain.plan.states import (
    MAX_LIVE,
    SUB_GROUP,
    Held,
    gradient_bytes,
    held_by,
    model_states,
    optimizer_bytes,
    resident_gradients,
    sharing,
    weight_bytes,
)

__all__ = ["memory", "model_states", "reserve"]

GIB = 2**30
WORKSPACE = 64 * MIB  # cuBLAS's, for the forward and the backward thread; measured before the first case
STATE_ROUNDING = 0.005  # of weights and state: measured 0 to 1.4%, by which block of the allocator each one got


def reserve(layout: Layout, peak: float = 0.0) -> float:
    """Bytes of a GPU that are not for tensors: CUDA's context, NCCL's buffers, holes between allocations.

    Measured outside the allocator: 0.69 GiB, 0.76 with NCCL and fsdp, 1.24 with DeepSpeed, 1.62 with its zero3. What
    NCCL takes among several GPUs was not had here: 1 GiB is assumed. Of the peak, 3% for holes that no tensor fits
    into: assumed, too (`benchmarks/planner/measure.py --groups limits` looks for it).
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


# ---- a transformer: what is always there, and the five moments -----------------------------------------------


def of_rank(shape: Transformer, layout: Layout, cut: tuple[Stage, ...], waiting: int) -> list[Item]:
    """The items of one rank's worst moment."""
    held = held_by(shape, layout, cut)
    tokens = layout.micro_batch_size * shape.seq_len
    saved = saved_items(shape, layout, cut, waiting, tokens)
    moments = [
        saved + scores_items(shape, layout, held, cut, tokens, waiting),
        saved + loss_items(shape, layout, held, cut, tokens, waiting),
        saved + block_items(shape, layout, held, tokens, waiting),
        ends_items(shape, layout, held, tokens),
        update_items(layout, held),
    ]
    always = state_items(layout, held) + batch_items(shape, layout, cut, tokens)
    return always + max(moments, key=total)


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
    only_input = allocated(tokens * WIDE * shape.dim / (layout.tp if layout.sequence_parallel else 1))
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


def logit_items(
    shape: Transformer, layout: Layout, cut: tuple[Stage, ...], tokens: int, waiting: int, each: float, why: str
) -> list[Item]:
    """`each` bytes for every logit of one pass; gpipe keeps the log-softmax of the passes before, too."""
    if not any(stage.is_last for stage in cut):
        return []
    asked = round(tokens * shape.asked)
    rows = shape.vocab_size // (layout.tp if layout.loss_parallel else 1)
    older = (waiting - 1) * WIDE if layout.schedule == "gpipe" and layout.pp > 1 else 0
    return [Item("logits", why, asked * rows * (each + older), "{:,} tokens × {:,} rows × {:g} bytes",
                 (asked, rows, each + older))]  # fmt: skip


def scores_items(
    shape: Transformer, layout: Layout, held: Held, cut: tuple[Stage, ...], tokens: int, waiting: int
) -> list[Item]:
    """The loss is being computed: logits as the product gave them, in float32, and their log-softmax.

    Compiled as one graph, the float32 ones are never written.
    """
    e = product_bytes(layout.precision)
    each = e if way_of(layout).graph == "whole" else (e if e != WIDE else 0) + 2 * WIDE
    items = logit_items(shape, layout, cut, tokens, waiting, each, "logits, in float32, log-softmax")
    return items + copies_items(layout, held, cut, waiting, forward=True) + resident_items(layout, held)


def loss_items(
    shape: Transformer, layout: Layout, held: Held, cut: tuple[Stage, ...], tokens: int, waiting: int
) -> list[Item]:
    """The backward pass begins: the log-softmax, its gradient and the logits' gradient, all float32.

    Compiled as one graph there are only 16-bit logits, whose gradient takes their place, beside the head's gradient.
    """
    e = product_bytes(layout.precision)
    whole = way_of(layout).graph == "whole"
    items = logit_items(shape, layout, cut, tokens, waiting, e if whole else 3 * WIDE, "log-softmax and two gradients")
    if whole and not shape.lora_rank:
        items.append(Item("gradients", "of the head", float(e * held.head), "{:,} × {}", (held.head, e)))
    return items + copies_items(layout, held, cut, waiting, forward=False) + resident_items(layout, held)


def copies_items(layout: Layout, held: Held, cut: tuple[Stage, ...], waiting: int, forward: bool) -> list[Item]:
    """Weights in the product's type beside those that are held.

    fsdp gathers the ends for the whole pass, and a block beside (measured: one at the loss); kept whole under grad_op
    and in pipelines. zero3 keeps what it will use again, up to MAX_LIVE. Autocast remembers every cast until the
    forward pass ends, the graph those of layers that are not computed again; each pass of a pipeline has its own.
    """
    e, share = product_bytes(layout.precision), sharing(layout)
    if share.zero == 3:
        live = e * min(held.parameters, MAX_LIVE) if layout.dp > 1 or layout.offload_params != "none" else 0.0
        return [Item("buffers", "gathered weights", live, "at most {:,} × {} bytes", (MAX_LIVE, e))]
    if share.zero:
        return []
    if share.gathers:
        whole = layout.data == "grad_op" or layout.pp > 1
        count = held.parameters if whole else held.ends + held.block
        return [Item("buffers", "gathered weights", e * count, "{:,} × {} bytes", (count, e))]
    if e == WIDE:
        return []
    cast = held.parameters - held.frozen16 - (held.ends - held.head)
    if not forward or layout.pp > 1:
        layers = sum(stage.layers for stage in cut)
        kept = sum(kept_layers(stage.layers, layout)[0] for stage in cut) / layers
        cast = round(kept * (cast - held.head)) + held.head
    passes = max(1, round(waiting / len(cut)))
    return [Item("buffers", "weights cast to 16 bits", passes * e * cast, "{} × {:,} × {} bytes", (passes, cast, e))]


def resident_items(layout: Layout, held: Held) -> list[Item]:
    if layout.offload != "none" and layout.data != "zero1":
        return []
    value, why = resident_gradients(held, layout)
    return [Item("gradients", why, value, "{:,} trained parameters", (held.trained,))] if value else []


def block_items(shape: Transformer, layout: Layout, held: Held, tokens: int, waiting: int) -> list[Item]:
    """The last block's backward pass: what it computes again, its gradients, and buffers that come with the first.

    zero2 takes its whole share of the gradients and two buckets at the first one (measured, with offload, too).
    """
    way, share, e = way_of(layout), sharing(layout), product_bytes(layout.precision)
    temporary = block_again_bytes(shape, way, tokens)
    items = [Item("activations", "gradients in a block", temporary, "{:,} tokens", (tokens,))]
    if layout.activation_checkpointing != "none":
        again = sum(block_bytes(shape, way, tokens))
        items.append(Item("activations", "a block computed again", again, "{:,} tokens", (tokens,)))
    items += copies_items(layout, held, (), waiting, forward=False) if share.gathers or share.zero else []
    if share.gathers:
        # the next block is gathered, this one's gradient is there in 16 bits and copied to 32 to be reduced
        beside = (2 * e + WIDE) * held.block
        items.append(Item("buffers", "a block's gradient on its way", beside, "{:,} × {}", (held.block, 2 * e + WIDE)))
    if share.zero == 2:
        items.append(Item("gradients", "this rank's share", gradient_bytes(held, layout), "{:,} over {}",
                          (held.trained, share.gradients)))  # fmt: skip
    if share.zero in (1, 2):
        items.append(Item("buffers", "buckets", 2 * layout.bucket_mb * MIB, "2 × {} MiB", (layout.bucket_mb,)))
    return items if share.zero == 2 else items + resident_items(layout, held)


def ends_items(shape: Transformer, layout: Layout, held: Held, tokens: int) -> list[Item]:
    """The backward pass ends: all gradients, and of the embedding one more before the two are added.

    fsdp reduces what is not in blocks as one unit: gathered weights, 16-bit gradients, and these in float32.
    """
    share, e = sharing(layout), product_bytes(layout.precision)
    items = [Item("activations", "gradient of the first block", tokens * 2.0 * WIDE * shape.dim, "{:,}", (tokens,))]
    if layout.activation_checkpointing != "none":
        again = sum(block_bytes(shape, way_of(layout), tokens))
        items.append(Item("activations", "a block computed again", again, "{:,} tokens", (tokens,)))
    gradients = gradient_bytes(held, layout) if layout.offload == "none" or share.zero in (1, 2) else 0.0
    if share.gathers and layout.micro_batches > 1:
        gradients += WIDE * held.trained  # whole ones, which are only now shared
    items.append(Item("gradients", "all", gradients, "{:,} over {}", (held.trained, share.gradients)))
    if share.zero == 1:
        items.append(Item("gradients", "all, in 16 bits", e * held.trained, "{:,} × {}", (held.trained, e)))
    if share.gathers:
        ends = held.ends if not shape.lora_rank else 0
        items.append(Item("buffers", "gradient of the ends on its way", (e + WIDE) * ends, "{:,}", (ends,)))
    elif not shape.lora_rank:
        table = (e if share.zero else WIDE) * held.embed
        items.append(Item("gradients", "of the embedding, once more", table, "{:,}", (held.embed,)))
    return items


def update_items(layout: Layout, held: Held) -> list[Item]:
    """All gradients and no activations. torch's fused AdamW needs nothing beside.

    zero2 squares its largest weight's gradient in 8 bytes, zero3 copies SUB_GROUP elements at a time (measured).
    """
    share = sharing(layout)
    gradients = gradient_bytes(held, layout) if layout.offload == "none" or share.zero == 1 else 0.0
    items = [Item("gradients", "all", gradients, "{:,} over {}", (held.trained, share.gradients))]
    mine = held.trained / max(share.optimizer, 1)
    if layout.offload != "none":
        return items
    if share.zero == 1:
        e = product_bytes(layout.precision)
        items.append(Item("gradients", "all, in 16 bits", e * held.trained, "{:,} × {}", (held.trained, e)))
    if share.zero == 2:
        square = 8 * min(held.largest, mine)
        items.append(Item("buffers", "a gradient squared", square, "{:,.0f} × 8 bytes", (square / 8,)))
    if share.zero == 3:
        copy = WIDE * min(mine, SUB_GROUP)
        items.append(Item("buffers", "gradients for the update", copy, "{:,.0f} × 4 bytes", (copy / WIDE,)))
    return items


# ---- a convolutional network ---------------------------------------------------------------------------------


def convolutional(shape: Convolutions, layout: Layout) -> list[Item]:
    """The same for convolutions, which only data ranks share: somewhere in the backward pass, or the update."""
    count, share, e = held_parameters(shape), sharing(layout), product_bytes(layout.precision)
    held = Held(count, count, 0, 0, 0, 0, max(layer.parameters for layer in shape.layers), count)
    samples, pictures = layout.micro_batch_size, layout.micro_batch_size * layout.micro_batches
    picture = convolution_bytes(shape, layout)
    images = WIDE * shape.image_size**2 * shape.channels
    backward = [Item("activations", "saved", samples * picture, "{} pictures × {:,.0f}", (samples, picture))]
    if not share.zero and e != WIDE:
        backward.append(Item("buffers", "weights cast to 16 bits", float(e * count), "{:,} × {}", (count, e)))
    always = [*state_items(layout, held), Item("buffers", "pictures", pictures * images, "{} × {}", (pictures, images))]
    moments = [backward + resident_items(layout, held), update_items(layout, held)]
    return always + max(moments, key=total)
