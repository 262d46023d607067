"""The six phases of a step at which memory can peak: what exists only in that phase.

Each function returns items in bytes for one rank of a transformer. peak.py lists the phases and takes the worst.
"""

from __future__ import annotations

from dtrain.kernels import chunk_rows
from dtrain.plan.layout import SERVED, Layout
from dtrain.plan.ledger import Item
from dtrain.plan.memory.activations import (
    MIB,
    WIDE,
    block_again_bytes,
    kept_layers,
    product_bytes,
    recomputed_bytes,
    stream_bytes,
    way_of,
)
from dtrain.plan.memory.context import context_items
from dtrain.plan.memory.head import fuses_loss
from dtrain.plan.memory.states import (
    MAX_LIVE,
    SUB_GROUP,
    HeldParameters,
    cut_in_every_pass,
    gradient_bytes,
    is_pure,
    resident_gradients,
    sharing,
    state_bytes,
)
from dtrain.plan.model_shape import Transformer
from dtrain.plan.parameters import Stage


def logit_items(
    shape: Transformer, layout: Layout, cut: tuple[Stage, ...], tokens: int, waiting: int, each: float, why: str
) -> list[Item]:
    """`each` bytes for every logit of one pass; gpipe also keeps the log-softmax of earlier passes."""
    if not any(stage.is_last for stage in cut):
        return []
    asked, rows = asked_rows(shape, layout, tokens)
    older = (waiting - 1) * WIDE if layout.schedule == "gpipe" and layout.pp > 1 else 0
    return [Item("logits", why, asked * rows * (each + older), "{:,} tokens × {:,} rows × {:g} bytes",
                 (asked, rows, each + older))]  # fmt: skip


def asked_rows(shape: Transformer, layout: Layout, tokens: int) -> tuple[int, int]:
    """(tokens whose logits are computed, rows of the head on this rank)."""
    cut_over = layout.tp if layout.loss_parallel and shape.task != "classify" else 1  # a few classes are never sharded
    return round(tokens * shape.asked), shape.vocab_size // cut_over


# ---- head and loss as one operation --------------------------------------------------------------------------


def chunk_items(
    shape: Transformer, layout: Layout, held: HeldParameters, cut: tuple[Stage, ...], tokens: int
) -> list[Item]:
    """One chunk is in memory: its logits, and the fp32 gradients so far of the head's input and of its weights.

    With a sharded vocabulary, plain operations need three more fp32 copies of the chunk.
    """
    if not any(stage.is_last for stage in cut):
        return []
    e, (asked, rows) = product_bytes(layout.precision), asked_rows(shape, layout, tokens)
    chunk, each = min(asked, chunk_rows(asked, rows)), e + (3 * WIDE if layout.loss_parallel else 0)
    head = 0 if shape.lora_rank else held.head
    return [
        Item("logits", "of one chunk", chunk * rows * each, "{:,} tokens × {:,} rows × {} bytes", (chunk, rows, each)),
        Item("activations", "gradient of the head's input", asked * WIDE * shape.dim, "{:,} × {}", (asked, WIDE)),
        Item("gradients", "of the head", float(WIDE * head), "{:,} × 4 bytes", (head,)),
    ]


def waiting_head_items(
    shape: Transformer, layout: Layout, held: HeldParameters, cut: tuple[Stage, ...], waiting: int
) -> list[Item]:
    """The backward pass starts: every pass in flight has an fp32 gradient of the head.

    One of them is scaled and cast to its weight's dtype.
    """
    if shape.lora_rank or not any(stage.is_last for stage in cut):
        return []
    share, e = sharing(layout), product_bytes(layout.precision)
    passes = max(1, round(waiting / len(cut)))
    each = passes * WIDE + (e if share.gathers or share.zero else state_bytes(layout))
    return [Item("gradients", "of the head", float(each * held.head), "{:,} × {}", (held.head, each))]


# ---- the phases ----------------------------------------------------------------------------------------------


def scores_items(
    shape: Transformer, layout: Layout, held: HeldParameters, cut: tuple[Stage, ...], tokens: int, waiting: int
) -> list[Item]:
    """The loss is computed: logits in the matmul's dtype, in fp32, and their log-softmax.

    Compiled as one graph, the fp32 logits are never written. Loss parallel has one more copy, here and in the backward
    pass (measured), each of a rank's own rows.
    """
    if fuses_loss(shape, layout):
        items = chunk_items(shape, layout, held, cut, tokens)
        return items + copies_items(layout, held, cut, waiting, forward=True) + resident_items(layout, held)
    e = product_bytes(layout.precision)
    copies = 3 if layout.loss_parallel else 2
    each = e if way_of(layout).graph == "whole" else (e if e != WIDE else 0) + copies * WIDE
    items = logit_items(shape, layout, cut, tokens, waiting, each, "logits, in float32, log-softmax")
    return items + copies_items(layout, held, cut, waiting, forward=True) + resident_items(layout, held)


def loss_items(
    shape: Transformer, layout: Layout, held: HeldParameters, cut: tuple[Stage, ...], tokens: int, waiting: int
) -> list[Item]:
    """The backward pass starts: the log-softmax, its gradient and the logits' gradient, all in fp32.

    Compiled as one graph there are only 16-bit logits, replaced in place by their gradient, beside the head's gradient.
    """
    if fuses_loss(shape, layout):
        items = waiting_head_items(shape, layout, held, cut, waiting)
        return items + copies_items(layout, held, cut, waiting, forward=False) + resident_items(layout, held)
    e = product_bytes(layout.precision)
    whole = way_of(layout).graph == "whole"
    each = e if whole else (4 if layout.loss_parallel else 3) * WIDE
    items = logit_items(shape, layout, cut, tokens, waiting, each, "log-softmax and its gradients")
    if whole and not shape.lora_rank:
        items.append(Item("gradients", "of the head", float(e * held.head), "{:,} × {}", (held.head, e)))
    return items + copies_items(layout, held, cut, waiting, forward=False) + resident_items(layout, held)


def copies_items(
    layout: Layout, held: HeldParameters, cut: tuple[Stage, ...], waiting: int, forward: bool
) -> list[Item]:
    """Copies of weights in the matmul's dtype, beside the stored weights.

    fsdp gathers the ends for the whole pass, plus one block (measured: one at the loss); grad_op and pipelines keep all
    weights gathered. zero3 keeps weights that it will use again, up to MAX_LIVE. Autocast caches every cast until the
    forward pass ends, but none inside a compiled graph; the graph keeps the casts of layers that are not recomputed;
    each pass of a pipeline has its own.
    """
    e, share = product_bytes(layout.precision), sharing(layout)
    if share.zero == 3:
        live = e * min(held.parameters, MAX_LIVE) if layout.token_ranks > 1 or layout.offload_params != "none" else 0.0
        return [Item("buffers", "gathered weights", live, "at most {:,} × {} bytes", (MAX_LIVE, e))]
    if share.zero:
        return []
    if share.gathers:
        whole = layout.data == "grad_op" or layout.pp > 1
        count = held.parameters if whole else held.ends + held.block
        return [Item("buffers", "gathered weights", e * count, "{:,} × {} bytes", (count, e))]
    if e == WIDE or is_pure(layout):
        return []
    cast = held.parameters - held.frozen16 - (held.ends - held.head)
    remembered = forward and way_of(layout).graph == "eager"
    if not remembered or layout.pp > 1:
        layers = sum(stage.layers for stage in cut)
        kept = sum(kept_layers(stage.layers, layout)[0] for stage in cut) / max(layers, 1)
        if layout.activation_checkpointing == "ops":
            kept = 0.0  # a cast is not a matmul
        cast = round(kept * (cast - held.head)) + (0 if layout.fused_loss and not forward else held.head)
    passes = max(1, round(waiting / len(cut)))
    return [Item("buffers", "weights cast to 16 bits", passes * e * cast, "{} × {:,} × {} bytes", (passes, cast, e))]


def resident_items(layout: Layout, held: HeldParameters) -> list[Item]:
    if layout.offload != "none" and layout.data not in ("zero1", "grad_op"):
        return []
    value, why = resident_gradients(held, layout)
    return [Item("gradients", why, value, "{:,} trained parameters", (held.trained,))] if value else []


def block_items(shape: Transformer, layout: Layout, held: HeldParameters, tokens: int, waiting: int) -> list[Item]:
    """The last block's backward pass: its recomputed tensors, its gradients, and buffers allocated with the first one.

    zero2 allocates its whole share of the gradients and two buckets at the first gradient (measured, also with
    offload).
    """
    way, share, e = way_of(layout), sharing(layout), product_bytes(layout.precision)
    temporary = block_again_bytes(shape, way, tokens)
    items = [Item("activations", "gradients in a block", temporary, "{:,} tokens", (tokens,))]
    if layout.activation_checkpointing != "none":
        again = recomputed_bytes(shape, way, tokens)
        items.append(Item("activations", "a recomputed block", again, "{:,} tokens", (tokens,)))
    items += context_items(shape, layout, tokens)
    if fuses_loss(shape, layout) and not shape.lora_rank and not share.zero and not resident_gradients(held, layout)[0]:
        each = e if share.gathers else state_bytes(layout)  # fsdp reduces it with the ends, when all of them are there
        items.append(Item("gradients", "of the head", float(each * held.head), "{:,} × {}", (held.head, each)))
    items += copies_items(layout, held, (), waiting, forward=False) if share.gathers or share.zero else []
    if share.gathers:
        # the next block is gathered; this block's 16-bit gradient is copied to fp32 to be reduced
        beside = (2 * e + WIDE) * held.block
        items.append(
            Item("buffers", "gradient of a block, being reduced", beside, "{:,} × {}", (held.block, 2 * e + WIDE))
        )
    if share.zero == 2:
        items.append(Item("gradients", "this rank's shard", gradient_bytes(held, layout), "{:,} over {}",
                          (held.trained, share.gradients)))  # fmt: skip
    if share.zero in (1, 2):
        items.append(Item("buffers", "buckets", 2 * layout.bucket_mb * MIB, "2 × {} MiB", (layout.bucket_mb,)))
    return items if share.zero == 2 else items + resident_items(layout, held)


def first_items(shape: Transformer, layout: Layout, held: HeldParameters, tokens: int) -> list[Item]:
    """The first block's backward pass, the last of all: nearly all gradients, and the block's recomputed tensors."""
    way = way_of(layout)
    items = [Item("activations", "gradients in a block", block_again_bytes(shape, way, tokens), "{:,}", (tokens,))]
    if layout.activation_checkpointing != "none":
        again = recomputed_bytes(shape, way, tokens)
        items.append(Item("activations", "a recomputed block", again, "{:,} tokens", (tokens,)))
    items += context_items(shape, layout, tokens)
    if sharing(layout).gathers:
        items += first_gathered_items(layout, held)
    return items + all_gradients_items(layout, held, left=0 if shape.lora_rank else held.ends)


def first_gathered_items(layout: Layout, held: HeldParameters) -> list[Item]:
    """Under fsdp, at the first block: it and the ends are gathered; its gradient is in 16 bits, and copied to fp32.

    Later blocks are already freed, also under grad_op; a pipeline keeps them all until its last pass is over.
    """
    e, block = product_bytes(layout.precision), held.trained * held.block // max(held.parameters, 1)
    count = held.parameters if layout.pp > 1 else held.ends + held.block
    return [
        Item("buffers", "gathered weights", float(e * count), "{:,} × {} bytes", (count, e)),
        Item(
            "buffers", "gradient of a block, being reduced", float((e + WIDE) * block), "{:,} × {}", (block, e + WIDE)
        ),
    ]


def ends_items(shape: Transformer, layout: Layout, held: HeldParameters, tokens: int) -> list[Item]:
    """The backward pass ends: all gradients, and the embedding's second gradient before the two are added.

    fsdp reduces parameters outside blocks as one unit: 16-bit gradients and their fp32 copy exist before its shard does
    (measured: llama-8b on 8 ranks). A pipeline's full gradients are sharded only now, unit by unit.
    """
    share, e, several = sharing(layout), product_bytes(layout.precision), layout.micro_batches > 1
    wide = float(stream_bytes(layout) + WIDE)  # as it arrives, and in fp32 for the embedding
    items = [Item("activations", "gradient of the first block", tokens * wide * shape.dim, "{:,}", (tokens,))]
    trained = 0 if shape.lora_rank else held.ends
    if share.gathers and layout.pp > 1:
        unit, kept = max(trained, held.block), held.parameters - held.ends
        on_its_way = WIDE * unit + WIDE * unit / share.gradients
        items.append(Item("buffers", "gathered weights", float(e * kept), "{:,} × {} bytes", (kept, e)))
        items.append(Item("buffers", "gradient of a unit, being reduced", on_its_way, "{:,}", (unit,)))
        return items + all_gradients_items(layout, held)
    if share.gathers:
        on_its_way = float((e + WIDE) * trained + e * held.uncut)
        items.append(Item("buffers", "gradient of embedding and head, being reduced", on_its_way, "{:,}", (trained,)))
        return items + all_gradients_items(layout, held, left=trained)
    table = (e if share.zero else state_bytes(layout)) * (0 if shape.lora_rank else held.embed)
    items.append(Item("gradients", "of the embedding, before they are added", float(table), "{:,}", (held.embed,)))
    if held.uncut:  # plus that of an earlier pass, to which it is added
        rows = held.uncut * (2 if several else 1)
        items.append(Item("gradients", "of the embedding, other ranks' rows", float(WIDE * rows), "{:,}", (rows,)))
    return items + all_gradients_items(layout, held)


def all_gradients_items(layout: Layout, held: HeldParameters, left: int = 0) -> list[Item]:
    """Gradients at the end of the backward pass; fsdp has not sharded those of `left` parameters yet in this pass."""
    share, e, several = sharing(layout), product_bytes(layout.precision), layout.micro_batches > 1
    gradients = gradient_bytes(held, layout) if layout.offload == "none" or share.zero in (1, 2) else 0.0
    if share.gathers and layout.pp > 1:
        gradients = float(state_bytes(layout) * (held.trained + held.uncut))  # unsharded until the last pass is over
    elif share.gathers:
        if left and not several:
            gradients *= 1 - left / held.trained
        elif not cut_in_every_pass(layout):
            gradients += state_bytes(layout) * left  # unsharded ones of earlier passes
    items = [Item("gradients", "all", gradients, "{:,} over {}", (held.trained, share.gradients))]
    if share.zero == 1:
        items.append(Item("gradients", "all, in 16 bits", float(e * held.trained), "{:,} × {}", (held.trained, e)))
    return items


def update_items(layout: Layout, held: HeldParameters) -> list[Item]:
    """All gradients and no activations. torch's fused AdamW needs nothing else.

    zero2 squares its largest weight's gradient in 8 bytes, zero3 copies SUB_GROUP elements at a time (measured).
    """
    share = sharing(layout)
    gradients = gradient_bytes(held, layout) if layout.offload == "none" or share.zero == 1 else 0.0
    items = [Item("gradients", "all", gradients, "{:,} over {}", (held.trained, share.gradients))]
    mine = held.trained / max(share.optimizer, 1)
    if layout.optimizer == "adafactor":  # squares of a gradient, and its update, a weight at a time
        one = 2 * WIDE * min(held.largest, mine)
        items.append(Item("buffers", "update of the largest weight", one, "{:,.0f} × 8 bytes", (one / 8,)))
    if layout.strategy == "ring" and layout.token_ranks > 1:  # before the update, to be sent
        items.append(Item("gradients", "all, as one tensor", gradients, "{:,} × 4 bytes", (held.trained,)))
    if held.twin:  # summed before the update: pipeline_stages.TiedWeights
        received = WIDE * held.twin / share.gradients
        numbers = (held.twin, share.gradients)
        items.append(Item("gradients", "of the embedding's copy, received", received, "{:,} over {}", numbers))
    if layout.data in SERVED:
        items.append(Item("buffers", "gradients for one server", WIDE * mine, "{:,.0f} × {} bytes", (mine, WIDE)))
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
