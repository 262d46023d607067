"""Time of an optimizer step on the slowest rank, as a sum of named parts.

compute: matmuls, attention and memory traffic of all passes, or the host's launches if they take longer. communication:
the part that does not overlap with computation. bubble: idle pipeline ranks. optimizer: gradient norm, clipping and
update. data: 0, because a loader that keeps up costs nothing; data_s in metrics.jsonl shows whether it does.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace

from dtrain.config.hardware import Hardware
from dtrain.plan import compression
from dtrain.plan.layout import Layout
from dtrain.plan.ledger import Item, total
from dtrain.plan.model_shape import Convolutions, Shape, Transformer
from dtrain.plan.parameters import Stage, held_parameters, parts, stages, trained_parameters
from dtrain.plan.time.collectives import Group, collective_s
from dtrain.plan.time.compute import HALF, Pass, block, head, last_product
from dtrain.plan.time.context import context_items
from dtrain.plan.time.convolutions import network
from dtrain.plan.time.data_parallel import Passes, Unit, data_items
from dtrain.plan.time.optimizer import optimizer_items
from dtrain.plan.time.pipeline import bubble_passes, bubble_share, pipeline_items
from dtrain.plan.time.roofline import moved_s
from dtrain.plan.time.stack import Stack, stack_of
from dtrain.strategies.stage_layout import stages_of_rank

CALLS = 3  # host time of a collective, in launches: an event before and after it, and the call itself


def step_time(shape: Shape, layout: Layout, hardware: Hardware, stack: Stack | None = None) -> list[Item]:
    """Seconds of one step, in parts that add up."""
    stack = stack or stack_of(layout)
    trained = rank_parameters(shape, layout)
    update = optimizer_items(layout, hardware, trained)
    ranks = rank_loads(shape, layout, hardware, stack, total(update))
    slowest = max(ranks, key=lambda rank: rank.busy_s)
    items = compute_items(layout, hardware, slowest, total(update))
    if layout.pp > 1:
        items += pipeline_items(shape, layout, hardware, stack, sum(rank.busy_s for rank in ranks) - slowest.busy_s)
    if layout.cp > 1 and isinstance(shape, Transformer):
        items += context_items(shape, layout, hardware, block_of(shape, layout, hardware, stack), again(layout))
    if layout.token_ranks > 1:
        passes, share = passes_of(shape, layout, hardware, stack), compression.share_sent(shape, layout)
        items += data_items(layout, hardware, stack, passes, trained, share)
    return items + update


def least_time(shape: Shape, layout: Layout, hardware: Hardware) -> float:
    """Seconds that `step_time` certainly exceeds: passes of blocks and head, shared evenly by the pipeline's ranks.

    A search uses it to skip slow layouts in a tenth of the time of a prediction.
    """
    if isinstance(shape, Convolutions):
        return 0.0
    stack, size, batch = stack_of(layout), size_of(layout), layout.micro_batch_size
    forward, backward = block_of(shape, layout, hardware, stack)
    ways = layout.tp if layout.loss_parallel or stack.sharded_head else 1
    first, last = head(shape.divided(layout.cp), hardware, stack, batch, ways, size)
    work = shape.num_layers * (forward.gpu_s + backward.gpu_s) + first.gpu_s + last.gpu_s
    share = layout.micro_batches * work * (hardware.calibration or 1.0) / layout.pp
    waits = bubble_share(layout) * bubble_passes(layout) / layout.micro_batches if layout.pp > 1 else 0.0
    # the slowest rank has at least this share, and a pass of the bubble takes as long as the others' on average
    return share * (1 + min(waits, layout.pp - 1))


def knows_enough(hardware: Hardware, layout: Layout) -> bool:
    """Are all hardware values known that this layout's step time needs?"""
    needed = [hardware.num_sms, hardware.peak_bf16_tflops, hardware.stream_gb_s, hardware.kernel_us]
    needed.append(hardware.peak_fp32_tflops if layout.precision == "fp32" else hardware.matmul_tflops)
    if layout.world_size > 1:
        needed += [hardware.gpus_per_node, hardware.gather_max_gb_s or hardware.pcie_gb_s]
    if layout.world_size > (hardware.gpus_per_node or layout.world_size):
        needed.append(hardware.network_max_gb_s or hardware.network_busbw_gb_s)
    return all(needed)


def size_of(layout: Layout) -> int:
    """Bytes of a matmul element."""
    return 4 if layout.precision == "fp32" else HALF


def again(layout: Layout) -> float:
    """Share of the blocks whose forward pass is recomputed in the backward pass, fully or in part."""
    every = 1 / layout.activation_checkpointing_every  # for many blocks
    return {"none": 0.0, "ops": 1.0, "selective": every, "full": 1.0}[layout.activation_checkpointing]


def computed_again(layout: Layout, stack: Stack, forward: Pass) -> Pass:
    """A block's recomputation, averaged over blocks: its forward pass, under `ops` without matmuls."""
    if layout.activation_checkpointing == "ops":
        forward = Pass(moved=forward.moved, kernels=forward.kernels)
    return (forward + Pass(kernels=stack.again)) * again(layout)


# ---- the work of a rank --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Load:
    """A pipeline rank's step without the update: its blocks, the work of a pass, seconds of all passes."""

    layers: int
    work: Pass
    tensor_s: float  # of the collectives between tensor ranks, per block and pass
    launches: float  # by the host, including the update's
    gpu_s: float
    busy_s: float  # GPU time, plus launch-bound time


def rank_loads(shape: Shape, layout: Layout, hardware: Hardware, stack: Stack, update_s: float) -> list[Load]:
    """The load of each pipeline rank, including the collectives between tensor ranks.

    `update_s`: GPU time of the update. The host launches it too; GPU and host overlap over a whole step.
    """
    tensor, messages = tensor_s(shape, layout, hardware, stack) if isinstance(shape, Transformer) else (0.0, 0.0)
    calls = CALLS * messages  # by the host, per block
    n, slower, loads = layout.micro_batches, hardware.calibration or 1.0, []
    for layers, work in rank_works(shape, layout, hardware, stack):
        gpu = n * (work.gpu_s * slower + tensor * layers)
        launches = n * (work.kernels + calls * layers) + stack.update * layers
        host = launches * launch_s(hardware) if layout.waits_for_host else 0.0
        busy = longer(gpu + update_s, host) - update_s
        loads.append(Load(layers, work, tensor, launches, gpu, busy))
    return loads


def launch_s(hardware: Hardware) -> float:
    """Host time of a launch."""
    return (hardware.launch_us or 0.0) * 1e-6


def compute_items(layout: Layout, hardware: Hardware, rank: Load, update_s: float) -> list[Item]:
    """The passes of one step on this rank, the slowest."""
    n, slower = layout.micro_batches, hardware.calibration or 1.0
    each = "{} passes × {} blocks, embedding and head: {:.3f} ms a pass"
    items = [
        Item("compute", name, n * value * slower, each, (n, rank.layers, value * slower * 1e3))
        for name, value in (
            ("matmuls", rank.work.products), ("attention", rank.work.attention),
            ("norms, activations, casts, loss", rank.work.moved),
        )
    ]  # fmt: skip
    one = "none: a launch-bound step of {:.0f} launches is captured as a CUDA graph"
    hidden = (
        one if not layout.waits_for_host else "{:.0f} launches × {:.1f} µs, less the overlap with {:.1f} ms of GPU work"
    )
    numbers = (rank.launches, launch_s(hardware) * 1e6, (rank.gpu_s + update_s) * 1e3)
    items.append(Item("compute", "launch-bound time", rank.busy_s - rank.gpu_s, hidden, numbers))
    if layout.tp > 1:
        formula = "{} passes × {} blocks × {:.3f} ms"
        value = n * rank.layers * rank.tensor_s
        items.append(
            Item("communication", "tensor-parallel collectives", value, formula, (n, rank.layers, rank.tensor_s * 1e3))
        )
    return items


def longer(gpu_s: float, host_s: float) -> float:
    """Seconds of a pass in which GPU and host alternately wait for each other.

    Slightly more than the longer of the two, at most 19% if they are equal. The exponent fits our own runs on an H200
    best (the first 81 measured); single runs would put it between 2.3 and 8.
    """
    return float((gpu_s**4 + host_s**4) ** 0.25)


def rank_works(shape: Shape, layout: Layout, hardware: Hardware, stack: Stack) -> list[tuple[int, Pass]]:
    """(blocks, work of one pass) of each pipeline rank, including recomputation."""
    size, batch = size_of(layout), layout.micro_batch_size
    if isinstance(shape, Convolutions):
        forward, backward = network(shape, hardware, stack, batch, size)
        one = (
            forward
            + backward
            + computed_again(layout, replace(stack, again=0.0), forward)
            + weights_pass(held_parameters(shape), layout, hardware, stack)
        )
        return [(units(shape), one + Pass(kernels=stack.hooks * units(shape)))]
    forward, backward = block_of(shape, layout, hardware, stack)
    shape = shape.divided(layout.cp)
    unread = last_product(shape, hardware, stack, batch, layout.tp, size)
    ways = layout.tp if layout.loss_parallel or stack.sharded_head else 1
    first, last = head(shape, hardware, stack, batch, ways, size)
    works = []
    for held in ranks_of(shape, layout):
        layers = sum(stage.layers for stage in held)
        work = (forward + backward + computed_again(layout, stack, forward + unread * -1)) * layers
        work += Pass(kernels=stack.hooks * layers)
        if any(stage.is_last for stage in held):
            work += first + last
        work += weights_pass(sum(stage.parameters for stage in held), layout, hardware, stack)
        works.append((layers, work))
    return works


def block_of(shape: Transformer, layout: Layout, hardware: Hardware, stack: Stack) -> tuple[Pass, Pass]:
    """(forward, backward) of one block over a micro-batch, or this rank's part of its sequences.

    The queries of a part see keys of all parts, on average as many as in whole sequences.
    """
    degrees = (layout.tp, layout.sequence_parallel, size_of(layout))
    forward, backward = block(shape.divided(layout.cp), hardware, stack, layout.micro_batch_size, *degrees)
    if layout.cp == 1:
        return forward, backward
    return tuple(replace(one, attention=one.attention * layout.cp) for one in (forward, backward))  # type: ignore[return-value]


def units(shape: Convolutions) -> int:
    """Number of blocks that are gathered or recomputed as a unit; a network without blocks is one."""
    return max(layer.unit for layer in shape.layers) + 1 or 1


def weights_pass(parameters: float, layout: Layout, hardware: Hardware, stack: Stack) -> Pass:
    """Memory traffic of a pass per parameter outside matmuls: casts, and gradient accumulation."""
    if size_of(layout) == 4:
        num_bytes = 12.0 if layout.micro_batches > 1 else 0.0
    else:
        num_bytes = stack.casts + (stack.sums if layout.micro_batches > 1 else 0.0)
    return Pass(moved=moved_s(hardware, parameters * num_bytes))


def ranks_of(shape: Transformer, layout: Layout) -> tuple[tuple[Stage, ...], ...]:
    """Return the stages of each pipeline rank."""
    schedule = (layout.schedule, layout.stages_per_rank) if layout.pp > 1 else ("", 1)
    return dealt_out(shape, layout.pp, *schedule, layout.tp, layout.loss_parallel)


@functools.lru_cache(maxsize=4096)  # a search repeats few distinct calls
def dealt_out(
    shape: Transformer, pp: int, schedule: str, per_rank: int, tp: int, loss_parallel: bool
) -> tuple[tuple[Stage, ...], ...]:
    if pp == 1:
        return (stages(shape, 1, tp, loss_parallel),)
    held = [stages_of_rank(rank, pp, schedule, per_rank) for rank in range(pp)]
    cut = stages(shape, held[0][1], tp, loss_parallel)
    return tuple(tuple(cut[i] for i in ids) for ids, _ in held)


def rank_parameters(shape: Shape, layout: Layout) -> float:
    """Trained parameters of the fullest rank, before data ranks shard them."""
    if isinstance(shape, Convolutions):
        return held_parameters(shape)
    held = max(sum(stage.parameters for stage in held) for held in ranks_of(shape, layout))
    return held * trained_parameters(shape) / held_parameters(shape)


def passes_of(shape: Shape, layout: Layout, hardware: Hardware, stack: Stack) -> Passes:
    """What data-parallel collectives can overlap with: the all-gather units, and their seconds."""
    size, batch = size_of(layout), layout.micro_batch_size
    if isinstance(shape, Convolutions):
        forward, backward = network(shape, hardware, stack, batch, size)
        count = units(shape)
        each = Unit(held_parameters(shape) / count, forward.gpu_s / count, backward.gpu_s / count)
        return Passes(each, count, 0.0)
    forward, backward = block_of(shape, layout, hardware, stack)
    p = parts(shape, layout.tp, layout.loss_parallel)
    backward_s = backward.gpu_s + computed_again(layout, stack, forward).gpu_s
    ranks = ranks_of(shape, layout)
    ends = max(sum(stage.ends for stage in held) for held in ranks)
    layers = max(sum(stage.layers for stage in held) for held in ranks)
    trained = trained_parameters(shape) / held_parameters(shape)  # with adapters, the rest is gathered, not reduced
    return Passes(Unit(p.block, forward.gpu_s, backward_s), layers, ends, trained)


# ---- communication between tensor ranks ----------------------------------------------------------------------


def tensor_messages(shape: Transformer, layout: Layout, stack: Stack) -> list[tuple[str, float, float]]:
    """(kind, count, bytes) of the collectives between tensor ranks in one block and pass; nothing hides them.

    Forward, each half of a block ends with an all-reduce; backward, each starts with one, of its input gradient, ours
    in the residual stream's dtype. Sequence parallel replaces an all-reduce by a reduce-scatter and an all-gather.
    """
    elements = float(layout.micro_batch_size * shape.seq_len // layout.cp * shape.dim)
    size, gathers = size_of(layout), 1 + again(layout)
    passes = 1 if layout.activation_checkpointing == "ops" else gathers  # `ops` keeps the all-reduced results
    narrow, wide = elements * size, elements * (stack.stream if stack.sums_in_stream else size)
    if not layout.sequence_parallel:
        return [("all_reduce", 2 * passes, narrow), ("all_reduce", 2, wide)]
    forward = [("reduce_scatter", 2 * passes, narrow), ("all_gather", 2 * gathers, wide)]
    return [*forward, ("reduce_scatter", 2, wide), ("all_gather", 2, narrow)]


def tensor_s(shape: Transformer, layout: Layout, hardware: Hardware, stack: Stack) -> tuple[float, float]:
    """(seconds, number of collectives) of the tensor ranks in one block and pass."""
    if layout.tp == 1:
        return 0.0, 0.0
    group = Group(layout.tp, min(layout.tp, hardware.gpus_per_node or layout.tp))
    messages = tensor_messages(shape, layout, stack)
    seconds = sum(times * collective_s(hardware, kind, group, size) for kind, times, size in messages)
    return seconds, sum(times for _, times, _ in messages)
