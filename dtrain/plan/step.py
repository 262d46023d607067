"""How long an optimizer step takes on the slowest rank, as a sum of named parts.

compute: products, attention and memory traffic of all micro-batches, or the host's launches where they take longer.
communication: what is not hidden behind computation. bubble: pipeline ranks that wait. optimizer: clipping and update.
"""

from __future__ import annotations

from dataclasses import dataclass

from dtrain.hardware import Hardware
from dtrain.plan.collectives import Group, collective_s, send_s
from dtrain.plan.counts import parts, stage_bounds, stages
from dtrain.plan.kernels import moved_s
from dtrain.plan.layout import Layout
from dtrain.plan.ledger import Item
from dtrain.plan.shape import Shape, Transformer
from dtrain.plan.stacks import Stack, stack_of
from dtrain.plan.work import HALF, Pass, block, head

# NCCL runs in so many multiprocessors at once (its default number of channels within a node of NVSwitch); while it
# does, the computation beside it has so many fewer.
CHANNELS = 24
# Bytes that an update moves for each trained parameter in float32: gradient norm 4, clipping 8, AdamW reads weight,
# gradient and two moments and writes all but the gradient, 28. Divided by the rate that these kernels reach: 18 ms for the
# 1.56 billion parameters of GPT-2 1.5B on an H200.
UPDATE_BYTES = {"adamw": 40 / 0.83, "sgd": 32 / 0.83}


@dataclass(frozen=True)
class Work:
    """A micro-batch on one rank: its blocks and ends, forward and backward, with what is computed twice."""

    layers: int
    forward: Pass  # of one block
    backward: Pass
    again: float  # share of blocks whose forward pass is computed again
    ends: tuple[Pass, Pass]  # embedding, last norm, logits, loss; nothing in the middle of a pipeline


def step_time(shape: Shape, layout: Layout, hardware: Hardware, stack: Stack | None = None) -> list[Item]:
    """Seconds of one step, in parts that add up."""
    stack = stack or stack_of(layout)
    assert isinstance(shape, Transformer)
    size = 4 if layout.precision == "fp32" else HALF
    forward, backward = block(
        shape, hardware, stack, layout.micro_batch_size, layout.tp, layout.sequence_parallel, size
    )
    again = {"none": 0.0, "full": 1.0}.get(layout.activation_checkpointing, 1 / layout.activation_checkpointing_every)
    ways = layout.tp if layout.loss_parallel or stack.sharded_head else 1
    ends = head(shape, hardware, stack, layout.micro_batch_size, ways, size)
    one = forward + backward + forward * again
    tensor = tensor_s(shape, layout, hardware, again)
    launch = (hardware.launch_us or 0.0) * 1e-6 * stack.launch
    last = ends[0] + ends[1]
    slowest = 0.0
    bounds = stage_bounds(shape, layout.pp)
    for i, (low, high) in enumerate(bounds):
        work = one * (high - low) + (last if i == len(bounds) - 1 else Pass())
        slowest = max(slowest, max(work.gpu_s + tensor * (high - low), work.kernels * launch))
    layers = max(high - low for low, high in bounds)
    held = max(s.parameters for s in stages(shape, layout.pp, layout.tp, layout.loss_parallel))
    passes = layout.micro_batches
    gpu = one * layers + last
    items = [
        Item("compute", "matrix products", passes * gpu.products),
        Item("compute", "attention", passes * gpu.attention),
        Item("compute", "memory traffic", passes * gpu.moved),
    ]
    gap = slowest - gpu.gpu_s - tensor * layers
    items.append(Item("compute", "waiting for launches", passes * gap))
    if layout.tp > 1:
        items.append(Item("communication", "tensor ranks", passes * tensor * layers))
    if layout.pp > 1:
        items += pipeline_items(shape, layout, hardware, stack, slowest)
    items += data_items(shape, layout, hardware, stack, one, forward, held)
    items += optimizer_items(layout, hardware, held)
    return items


def tensor_s(shape: Transformer, layout: Layout, hardware: Hardware, again: float) -> float:
    """Seconds that tensor ranks communicate in one block: two all-reduces forward, two backward, two computed again."""
    if layout.tp == 1:
        return 0.0
    group = Group(layout.tp, min(layout.tp, hardware.gpus_per_node or layout.tp))
    num_bytes = layout.micro_batch_size * shape.seq_len * shape.dim * HALF
    return (4 + 2 * again) * collective_s(hardware, "all_reduce", group, num_bytes)


def pipeline_items(shape: Transformer, layout: Layout, hardware: Hardware, stack: Stack, slowest: float) -> list[Item]:
    """The bubble, and the activations that go from stage to stage."""
    virtual = layout.stages_per_rank
    bubble = (layout.pp - 1) / virtual * slowest
    crosses = layout.world_size > (hardware.gpus_per_node or layout.world_size)
    num_bytes = layout.micro_batch_size * shape.seq_len * shape.dim * stack.stream
    if stack.sharded_head:  # each tensor rank sends its part, and they gather on the other side
        group = Group(layout.tp, layout.tp)
        send = send_s(hardware, num_bytes / layout.tp, crosses)
        send += collective_s(hardware, "all_gather", group, num_bytes)
    else:
        send = send_s(hardware, num_bytes, crosses)
    sends = 2 * virtual * layout.micro_batches
    return [
        Item("bubble", "pipeline fills and empties", bubble, "({} - 1) / {} × {:.4f} s", (layout.pp, virtual, slowest)),
        Item("communication", "between stages", sends * send, "{} × {:.6f} s", (sends, send)),
    ]


def data_items(
    shape: Transformer, layout: Layout, hardware: Hardware, stack: Stack, one: Pass, forward: Pass, held: int
) -> list[Item]:
    """What the data ranks say to each other, less what hides behind computation."""
    if layout.dp == 1:
        return []
    per_node = max(1, min(layout.dp, (hardware.gpus_per_node or layout.dp) // layout.tp))
    group = Group(layout.dp, per_node)
    if layout.data == "ddp":
        reduce = collective_s(hardware, "all_reduce", group, held * stack.gradient)
        if not stack.overlap:
            return [Item("communication", "gradients", reduce)]
        beside = (one.gpu_s - forward.gpu_s) * shape.num_layers / layout.pp
        return [Item("communication", "gradients", exposed(hardware, reduce, beside))]
    p = parts(shape, layout.tp, layout.loss_parallel)
    count = stack.collectives_per_layer
    gather = count * collective_s(hardware, "all_gather", group, p.block * HALF / count)
    scatter = count * collective_s(hardware, "reduce_scatter", group, p.block * stack.gradient / count)
    layers = shape.num_layers / layout.pp
    regather = 0.0 if layout.data == "grad_op" else gather
    if not stack.overlap:
        again = gather if layout.activation_checkpointing == "full" else 0.0
        return [
            Item(
                "communication",
                "weights and gradients",
                layout.micro_batches * layers * (gather + again + regather + scatter),
            )
        ]
    there = exposed(hardware, gather, forward.gpu_s)
    back = exposed(hardware, regather + scatter, one.gpu_s - forward.gpu_s)
    ends = collective_s(hardware, "all_gather", group, (p.embed + p.head) * HALF)
    ends += collective_s(hardware, "reduce_scatter", group, (p.embed + p.head) * stack.gradient)
    passes = 1 if layout.pp > 1 else layout.micro_batches  # a pipeline keeps its layers gathered for the whole step
    return [
        Item("communication", "weights and gradients of blocks", passes * layers * (there + back)),
        Item("communication", "weights and gradients of the ends", passes * ends),
    ]


def exposed(hardware: Hardware, communication: float, computation: float) -> float:
    """Seconds that communication adds to the computation beside it: what is longer, and the multiprocessors it takes."""
    assert hardware.num_sms
    slowed = CHANNELS / hardware.num_sms * min(communication, computation)
    return max(0.0, communication - computation) + slowed


def optimizer_items(layout: Layout, hardware: Hardware, held: int) -> list[Item]:
    """Gradient norm, clipping and update of what this rank owns."""
    owned = held / layout.dp if layout.data not in ("ddp",) else held
    moved = UPDATE_BYTES[layout.optimizer]
    return [
        Item(
            "optimizer",
            "norm, clipping, update",
            moved_s(hardware, owned * moved),
            "{:.3g} × {:.0f} bytes",
            (owned, moved),
        )
    ]
