"""The collectives that a strategy's ranks call in one step: kind, bytes, count and group. No torch; nothing is built.

The other files here ask how long communication takes; this one lists the calls one by one, so that `dtrain comm bench`
can measure them on the user's network. tests/plan/time/test_messages.py compares it with what real runs call.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

from dtrain.config.hardware import Hardware
from dtrain.plan.layout import Layout
from dtrain.plan.model_shape import Convolutions, Shape, Transformer
from dtrain.plan.parameters import block_linears, has_tied_copy, is_target, stage_bounds
from dtrain.plan.time.data_parallel import exposed
from dtrain.plan.time.stack import Stack, stack_of
from dtrain.plan.time.step import knows_enough, passes_of, size_of, tensor_messages
from dtrain.strategies.stage_layout import stages_of_rank

MIB = 2**20
# Strategies whose calls are listed one by one; of the others only the planner's totals are known. With the models of
# other kinds than language, the lists have not been compared with real runs.
EXACT = ("ddp", "fsdp", "tensor", "pipeline", "3d")
PLANNED = ("zero1", "zero2", "zero3", "fairscale", "local_sgd")


@dataclass(frozen=True)
class Message:
    """One collective of a step, as one rank calls it."""

    kind: str  # all_reduce | all_gather | reduce_scatter | send_recv
    num_bytes: int  # of the whole tensor, as a rank has it before or after; of send_recv: what is sent
    count: int  # calls of one rank in a step; of send_recv: sends, and as many receives
    group: str  # world | data | shard | replicate | tensor | pipeline
    what: str
    hidden_by: str = ""  # forward | backward: the computation that it overlaps with; "": nothing


@dataclass(frozen=True)
class Weight:
    """One parameter tensor on a rank. FSDP shards and pads its first dimension."""

    rows: int
    per_row: int = 1
    trained: bool = True

    def padded(self, shards: int) -> int:
        return -(-self.rows // shards) * shards * self.per_row


Unit = list[Weight]  # gathered together, in the order of the forward pass


def messages(shape: Shape, layout: Layout, pp_rank: int = 0) -> list[Message]:
    """Return the calls of one rank in a step; `pp_rank`: of this pipeline rank."""
    stack = stack_of(layout)
    found = [m for stage in stages(shape, layout, pp_rank) for m in data_messages(layout, stack, *stage)]
    if isinstance(shape, Transformer):
        if layout.tp > 1:
            found += tensor_calls(shape, layout, stack, pp_rank)
        if layout.pp > 1:
            found += pipeline_calls(shape, layout, stack, pp_rank)
    return merged([*found, *small_calls(shape, layout)])


def is_exact(shape: Shape, layout: Layout) -> bool:
    """Is the list compared with real runs of this kind?"""
    return layout.strategy in EXACT and layout.cp == 1 and isinstance(shape, Transformer) and shape.kind == "language"


def merged(found: list[Message]) -> list[Message]:
    """Join equal calls."""
    counts: Counter[Message] = Counter()
    for message in found:
        counts[replace(message, count=0)] += message.count
    return [replace(message, count=count) for message, count in counts.items() if count]


# ---- time ----------------------------------------------------------------------------------------------------


def compute_s(shape: Shape, layout: Layout, hardware: Hardware) -> float | None:
    """Seconds of a step's forward and backward passes; None: the hardware's rates are not known."""
    if not knows_enough(hardware, replace(layout, dp=1, cp=1, tp=1, pp=1)):
        return None
    passes = passes_of(shape, layout, hardware, stack_of(layout))
    return layout.micro_batches * passes.count * (passes.unit.forward_s + passes.unit.backward_s)


def exposed_s(shape: Shape, layout: Layout, hardware: Hardware, timed: Sequence[tuple[Message, float]]) -> float | None:
    """Seconds of the calls, each with its time, that a step's computation does not hide; None: not known.

    Blocks are equal, so the sums over all of them are compared: what is sent with what is computed meanwhile. ddp
    sends only in the last pass.
    """
    if compute_s(shape, layout, hardware) is None:
        return None
    unit = (passes := passes_of(shape, layout, hardware, stack_of(layout))).unit
    times = passes.count * (1 if layout.data == "ddp" or layout.pp > 1 else layout.micro_batches)
    while_sent = {"forward": times * unit.forward_s, "backward": times * unit.backward_s, "": 0.0}
    return sum(
        exposed(hardware, sum(m.count * seconds for m, seconds in timed if m.hidden_by == name), computed)
        for name, computed in while_sent.items()
    )


# ---- weights -------------------------------------------------------------------------------------------------


def stages(shape: Shape, layout: Layout, pp_rank: int) -> list[tuple[list[Unit], Unit, Unit]]:
    """(blocks, first end, last end) of each stage that the rank holds."""
    if isinstance(shape, Convolutions):
        return [convolutions(shape)]
    ids, count = stages_of_rank(pp_rank, layout.pp, layout.schedule, layout.stages_per_rank)
    if layout.pp == 1:
        ids, count = [0], 1
    first, last = ends(shape, layout)
    made = []
    for low, high in (stage_bounds(shape, count)[i] for i in ids):
        is_first, is_last = low == 0, high == shape.num_layers
        copy = first[:1] if is_last and not is_first and has_tied_copy(shape) else []
        made.append(([block(shape, layout)] * (high - low), first if is_first else [], copy + last if is_last else []))
    return made


def block(shape: Transformer, layout: Layout) -> Unit:
    """The weights of one block; norms are placed as before attention and MLP."""
    tp, found = layout.tp, []
    for linear in block_linears(shape):
        if linear.name in ("attention.qkv", "attention.q") or linear.name == ("mlp.gate" if shape.gated else "mlp.up"):
            found += norm(shape)
        ins, outs = (linear.ins, linear.outs // tp) if linear.column else (linear.ins // tp, linear.outs)
        trained = not shape.lora_rank
        found += [Weight(outs, ins, trained), *([Weight(outs, 1, trained)] if linear.biased else [])]
        if shape.lora_rank and is_target(shape, linear):
            found += [Weight(shape.lora_rank, ins), Weight(outs, shape.lora_rank)]
    return found


def norm(shape: Transformer) -> Unit:
    return [Weight(shape.dim, 1, not shape.lora_rank)] * (2 if shape.biased else 1)


def ends(shape: Transformer, layout: Layout) -> tuple[Unit, Unit]:
    """(embedding and positions, last norm and head)."""
    d, ways, trained = shape.dim, layout.tp if layout.loss_parallel else 1, not shape.lora_rank
    first = [Weight(shape.rows // ways, d, trained)] if shape.rows else []
    if shape.kind == "vit":
        first = [Weight(d, shape.patch_inputs, trained), Weight(d, 1, trained), Weight(1, d, trained)]
    if shape.learned_positions:
        rows = 1 if shape.kind == "vit" else shape.learned_positions
        first.append(Weight(rows, shape.learned_positions * d // rows, trained))
    head: Unit = []
    if shape.kind == "bert":
        first += [Weight(2, d, trained), *norm(shape)]
        head = [Weight(d, d, trained), Weight(d, 1, trained)]
        if shape.task == "mlm":
            head += [*norm(shape), Weight(shape.vocab_size, 1, trained)]
        else:
            head += [Weight(shape.vocab_size, d), Weight(shape.vocab_size)]
        return first, head
    if shape.kind == "vit":
        head = [Weight(shape.vocab_size, d), Weight(shape.vocab_size)]
    elif not shape.tied:
        head = [Weight(shape.vocab_size // ways, d, trained)]
    return first, [*norm(shape), *head]


def convolutions(shape: Convolutions) -> tuple[list[Unit], Unit, Unit]:
    units: dict[int, Unit] = {}
    for layer in shape.layers:
        one = [Weight(layer.out_channels, layer.in_channels * layer.kernel**2)]
        one += [Weight(layer.out_channels)] * (2 if layer.norm else 1)
        units.setdefault(layer.unit, []).extend(one)
    last = [w for ins, outs in shape.linear for w in (Weight(outs, ins), Weight(outs))]
    first = units.pop(-1, [])
    return list(units.values()), first, last


# ---- data ranks ----------------------------------------------------------------------------------------------


def data_messages(layout: Layout, stack: Stack, blocks: list[Unit], first: Unit, last: Unit) -> list[Message]:
    """What the data ranks send for one stage."""
    if layout.token_ranks == 1:
        return []
    if layout.strategy in PLANNED:
        return planned(layout, stack, [w for unit in (first, *blocks, last) for w in unit])
    if layout.strategy == "ddp":
        return bucket_messages(layout, stack, [*first, *(w for unit in blocks for w in unit), *last])
    return fsdp_messages(layout, stack, blocks, [*first, *last])


def bucket_messages(layout: Layout, stack: Stack, weights: Unit) -> list[Message]:
    """DDP's buckets: filled in the order in which gradients arrive, the last weight first, and closed once full.

    The last bucket has the embedding, whose gradient is the last one: nothing is left to overlap with it.
    """
    buckets, size = [], 0
    for weight in reversed([w for w in weights if w.trained]):
        size += weight.rows * weight.per_row * stack.gradient
        if size >= layout.bucket_mb * MIB:
            buckets.append(size)
            size = 0
    found = [Message("all_reduce", b, 1, "data", "gradient bucket", "backward") for b in (*buckets, size)]
    return [m for m in [*found[:-1], replace(found[-1], hidden_by="", what="last gradient bucket")] if m.num_bytes]


def fsdp_messages(layout: Layout, stack: Stack, blocks: list[Unit], rest: Unit) -> list[Message]:
    """FSDP2: a unit is gathered forward and again backward, its gradients reduce-scattered.

    The rest (embedding, last norm, head) stays gathered between the passes. A pipeline gathers its layers once a step
    and reduces after the last micro-batch. With data=ddp, or between the replicas of hybrid, shards are all-reduced.
    """
    shards = layout.replica_size or layout.token_ranks
    if layout.strategy != "fsdp" and layout.data == "ddp":
        shards = 1
    copies, width = layout.token_ranks // shards, size_of(layout) if layout.precision != "bf16-pure" else 2
    piped, keep = layout.pp > 1, layout.pp > 1 or layout.data == "grad_op"
    passes = 1 if piped else layout.micro_batches
    reduces = 1 if piped or layout.data == "grad_op" else passes
    group = "shard" if copies > 1 else "data"
    found = []
    for unit, is_rest in (*((unit, False) for unit in blocks), (rest, True)):
        if not unit:
            continue
        whole = sum(w.padded(shards) for w in unit) * width
        gradients = sum(w.padded(shards) for w in unit if w.trained) * stack.gradient
        what = "embedding, norm and head" if is_rest else "block"
        if shards > 1:
            ahead = "" if is_rest else "forward"
            found.append(Message("all_gather", whole, passes, group, f"weights: {what}", ahead))
            if not is_rest and not keep:
                found.append(Message("all_gather", whole, passes, group, f"weights again: {what}", "backward"))
            behind = "" if is_rest else "backward"
            found.append(Message("reduce_scatter", gradients, reduces, group, f"gradients: {what}", behind))
        if copies > 1:
            part = gradients // shards
            found.append(
                Message("all_reduce", part, 1, "replicate", f"gradients: {what}", "" if is_rest else "backward")
            )
    return [m for m in found if m.num_bytes]


def planned(layout: Layout, stack: Stack, weights: Unit) -> list[Message]:
    """The planner's totals for strategies whose buckets are their library's: as if each were one call."""
    trained = sum(w.rows * w.per_row for w in weights if w.trained)
    width, times = size_of(layout), layout.micro_batches
    if layout.strategy == "local_sgd":  # its share of a step
        what = f"weights and moments, 1/{layout.every} of them: averaged in every {layout.every}th step"
        return [Message("all_reduce", (1 + layout.moments) * trained * 4 // layout.every, 1, "data", what)]
    if layout.data == "zero3":
        return [
            Message("all_gather", trained * width, times, "data", "weights", "forward"),
            Message("all_gather", trained * width, times, "data", "weights again", "backward"),
            Message("reduce_scatter", trained * stack.gradient, times, "data", "gradients", "backward"),
        ]
    kind = "reduce_scatter" if layout.data == "sharded_ddp" else "all_reduce"
    passes = times if layout.data == "zero2" else 1
    width = 4 if layout.data in ("oss", "sharded_ddp") else width
    return [
        Message(kind, trained * stack.gradient, passes, "data", "gradients", "backward"),
        Message("all_gather", trained * width, 1, "data", "updated weights"),
    ]


# ---- tensor and pipeline ranks, and the small ones -----------------------------------------------------------


def tensor_calls(shape: Transformer, layout: Layout, stack: Stack, pp_rank: int) -> list[Message]:
    """Calls between tensor ranks: those of the blocks, and those of embedding, head and loss."""
    held = stages(shape, layout, pp_rank)
    layers, passes = sum(len(blocks) for blocks, _, _ in held), layout.micro_batches
    found = [
        Message(kind, int(size), round(times * layers * passes), "tensor", "activations of blocks")
        for kind, times, size in tensor_messages(shape, layout, stack)
    ]
    has_first, has_last = any(first for _, first, _ in held), any(last for _, _, last in held)
    samples = layout.micro_batch_size * shape.seq_len // layout.cp
    stream = samples * shape.dim * stack.stream
    if layout.sequence_parallel:
        # the embedding's output is split, the head's input gathered
        found.append(
            Message("all_gather", stream, passes * (has_first + has_last), "tensor", "activations at the ends")
        )
        # each rank's norms see a part of the sequence; fsdp asks for each of their gradients in every pass
        norms = (sum(2 * len(blocks) for blocks, _, _ in held) + has_last) * len(norm(shape))
        size, calls = shape.dim * stack.gradient, norms * passes
        one = (norms * size, 1) if layout.token_ranks == 1 else (size, calls)
        found.append(Message("all_reduce", *one, "tensor", "gradients of norms"))
    if layout.loss_parallel:
        if not layout.sequence_parallel:
            calls = passes * (has_first + has_last)
            found.append(Message("all_reduce", stream, calls, "tensor", "embedding, and the head's input gradient"))
        found.append(Message("all_reduce", samples * 4, 3 * passes * has_last, "tensor", "loss over shards"))
    return found


def pipeline_calls(shape: Transformer, layout: Layout, stack: Stack, pp_rank: int) -> list[Message]:
    """Activations forward and their gradients backward; the tied embedding's gradient; the loss."""
    places: dict[int, int] = {}  # stage → pipeline rank
    for rank in range(layout.pp):
        ids, count = stages_of_rank(rank, layout.pp, layout.schedule, layout.stages_per_rank)
        places |= dict.fromkeys(ids, rank)
    hops = sum(
        (places[i] == pp_rank) + (places[i + 1] == pp_rank) for i in range(count - 1) if places[i] != places[i + 1]
    )
    num_bytes = layout.micro_batch_size * shape.seq_len // layout.cp * shape.dim * stack.stream
    num_bytes //= layout.tp if layout.sequence_parallel else 1
    found = [
        Message("send_recv", num_bytes, hops * layout.micro_batches, "pipeline", "activations and their gradients")
    ]
    holders = {places[0], places[count - 1]}
    if has_tied_copy(shape) and not shape.lora_rank and pp_rank in holders and len(holders) == 2:
        table = ends(shape, layout)[0][0]
        shards = layout.token_ranks if layout.data == "fsdp" else 1
        swapped = table.padded(shards) // shards * stack.gradient
        found.append(Message("send_recv", swapped, 1, "pipeline", "gradient of the tied embedding"))
    return [*found, Message("all_reduce", 4, 1, "pipeline", "loss")]


def small_calls(shape: Shape, layout: Layout) -> list[Message]:
    """Gradient norm, mean loss and flags, and the number of targets: a few bytes, but each waits for all ranks."""
    if layout.strategy in PLANNED or layout.world_size == 1:
        return []
    found = []
    if layout.strategy != "ddp":
        found.append(Message("all_reduce", 4, 1, "world", "gradient norm"))
    if layout.token_ranks > 1:
        found.append(Message("all_reduce", 8, 1, "data", "loss and flags"))
    if layout.token_ranks < layout.world_size:
        found.append(Message("all_reduce", 8, 1, "world", "flags"))
    if layout.token_ranks > 1 and isinstance(shape, Transformer) and shape.task == "mlm":
        found.append(Message("all_reduce", 4, 1, "data", "number of targets"))
    return found
