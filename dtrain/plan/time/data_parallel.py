"""Communication of data-parallel ranks in a step, and how much of it overlaps with computation."""

from __future__ import annotations

import math
from dataclasses import dataclass

from dtrain.config.hardware import Hardware
from dtrain.plan.compression import PASSES
from dtrain.plan.layout import SERVED, Layout
from dtrain.plan.ledger import Item
from dtrain.plan.time.collectives import Group, collective_s
from dtrain.plan.time.stack import Stack

# NCCL occupies this many SMs (its channels within a node of NVSwitch); overlapping computation has that many fewer.
CHANNELS = 24
HALF = 2
INT8 = 1 + 4 / 256  # bytes of a value, with its share of a block's scale (comm/quantize.py)


@dataclass(frozen=True)
class Unit:
    """One all-gather unit: its parameters, and its seconds forward and backward."""

    parameters: float
    forward_s: float
    backward_s: float


@dataclass(frozen=True)
class Passes:
    """One pass: a number of equal units, and the parameters of the ends, which belong to no unit."""

    unit: Unit
    count: int
    ends: float
    trained: float = 1.0  # share of the parameters with gradients


def data_items(
    layout: Layout, hardware: Hardware, stack: Stack, passes: Passes, trained: float, share: float = 1.0
) -> list[Item]:
    """Seconds that the data ranks' collectives add to a step. `share`: of the bytes, with compression."""
    group = data_group(layout, hardware)
    items = compression_items(layout, hardware, trained)
    if layout.data in ("fsdp", "grad_op", "zero3"):
        return sharded_items(layout, hardware, stack, passes, group, share) + items
    return replicated_items(layout, hardware, stack, passes, group, trained, share) + items


def compression_items(layout: Layout, hardware: Hardware, trained: float) -> list[Item]:
    """Device memory traffic of compressing and decompressing, which competes with the backward pass for bandwidth."""
    if layout.compress == "none":
        return []
    times, held = PASSES[layout.compress], trained / (layout.replica_size or 1)
    rate = (hardware.stream_gb_s or math.inf) * 1e9
    formula = "{:.3g} gradients × 4 bytes, read or written {} times"
    return [Item("communication", "compression", held * 4 * times / rate, formula, (held, times))]


def data_group(layout: Layout, hardware: Hardware) -> Group:
    """The data ranks: within a node, as many as tensor parallelism leaves room for."""
    room = max(1, (hardware.gpus_per_node or layout.token_ranks) // layout.tp)
    return Group(layout.token_ranks, min(layout.token_ranks, room))


def replicated_items(
    layout: Layout, hardware: Hardware, stack: Stack, passes: Passes, group: Group, trained: float, share: float = 1.0
) -> list[Item]:
    """Gradients are reduced during the last backward pass; with sharded optimizer state, weights are gathered after.

    The embedding's gradients come last, so nothing hides them. DeepSpeed's first two stages reduce full gradients in
    fp32, the second in every pass (benchmarks/results/traffic-cpu.json: 2.25 times the weights on 4 ranks).
    """
    kind = "reduce_scatter" if layout.data == "sharded_ddp" else "all_reduce"
    if layout.strategy in ("local_sgd", "diloco"):
        return [exchange_item(layout, hardware, group, trained)]
    if layout.data in SERVED:
        return server_items(layout, hardware, group, trained)
    width = stack.gradient if layout.compress == "none" else 4 * share
    last = min(trained, passes.ends * passes.trained) * width
    num_bytes = trained * width - last
    one = collective_s(hardware, kind, group, num_bytes, stack.network)
    rest = collective_s(hardware, kind, group, last, stack.network)
    backward = passes.count * passes.unit.backward_s
    times = layout.micro_batches if layout.data == "zero2" else 1
    overlaps = stack.overlap and layout.strategy != "ring"  # ring sends everything after the backward pass
    added = times * ((exposed(hardware, one, backward) if overlaps else one) + rest)
    items = [
        Item(
            "communication", "gradients", added,
            "{} × ({} of {:.3g} bytes over {} ranks takes {:.2f} ms, overlapping {:.2f} ms of backward pass; "
            "the embedding's, at the end, {:.2f} ms)",
            (times, kind, num_bytes, group.size, one * 1e3, backward * 1e3 if overlaps else 0.0, rest * 1e3),
        )
    ]  # fmt: skip
    if layout.data != "ddp":
        width = 4 if layout.data in ("oss", "sharded_ddp") or layout.precision == "fp32" else HALF
        back = collective_s(hardware, "all_gather", group, trained * width, stack.network)
        formula = "all_gather of {:.3g} × {} bytes"
        items.append(Item("communication", "updated weights", back, formula, (trained, width)))
    return items


def exchange_item(layout: Layout, hardware: Hardware, group: Group, trained: float) -> Item:
    """Every few steps local_sgd averages weights and moments, and diloco changes of the weights, in 4 bytes or one."""
    if layout.strategy == "local_sgd":
        each = 4.0 * (1 + layout.moments)
    else:
        each = INT8 if layout.exchange == "int8" else 4.0
    one = collective_s(hardware, "all_reduce", group, each * trained) / layout.every
    formula = "{:.3g} bytes × {:.3g}, in every {}th step"
    return Item("communication", "exchange of weights", one, formula, (each, trained, layout.every))


def server_items(layout: Layout, hardware: Hardware, group: Group, trained: float) -> list[Item]:
    """A parameter server: gradients to their owners and weights back, once a step, or for each micro-batch if not sync.

    All ranks are servers, so a rank sends as much as in a reduce-scatter and an all-gather. Nothing overlaps with the
    passes, and a GPU's tensors go through host memory.
    """
    num_bytes = trained * 4
    once = sum(collective_s(hardware, kind, group, num_bytes) for kind in ("reduce_scatter", "all_gather"))
    times = 1 if layout.data == "sync" else layout.micro_batches
    formula = "{} × (reduce_scatter and all_gather of {:.3g} bytes over {} ranks takes {:.2f} ms, without overlap)"
    numbers = (times, num_bytes, group.size, once * 1e3)
    items = [Item("communication", "gradients to servers, weights back", times * once, formula, numbers)]
    if hardware.pcie_gb_s:
        carried = times * 2 * num_bytes / (hardware.pcie_gb_s * 1e9)
        formula = "{} × 2 × {:.3g} bytes over PCIe"
        items.append(Item("communication", "through host memory", carried, formula, (times, num_bytes)))
    return items


def sharded_items(
    layout: Layout, hardware: Hardware, stack: Stack, passes: Passes, group: Group, compressed: float = 1.0
) -> list[Item]:
    """Weights are all-gathered unit by unit, forward and again backward, and gradients reduce-scattered."""
    shards = (
        group if layout.replica_size is None else Group(layout.replica_size, min(layout.replica_size, group.per_node))
    )
    width = 4 if layout.precision == "fp32" else HALF
    cuts, share = stack.collectives_per_layer, stack.network

    def gather_s(parameters: float) -> float:
        return cuts * collective_s(hardware, "all_gather", shards, parameters * width / cuts, share)

    def scatter_s(parameters: float) -> float:
        num_bytes = parameters * passes.trained * stack.gradient
        return cuts * collective_s(hardware, "reduce_scatter", shards, num_bytes / cuts, share)

    unit, keep = passes.unit, layout.data == "grad_op" or layout.pp > 1
    times = 1 if layout.pp > 1 else layout.micro_batches  # a pipeline keeps its layers gathered for the whole step
    reduces = 1 if layout.data == "grad_op" and not stack.reduce_every_pass else times
    gather, scatter = gather_s(unit.parameters), scatter_s(unit.parameters)
    back = 0.0 if keep else gather
    if not stack.overlap:
        again = gather if layout.activation_checkpointing == "full" else 0.0
        added = passes.count * (times * (gather + again + back) + reduces * scatter)
    else:
        there = exposed(hardware, gather, unit.forward_s)
        quiet = exposed(hardware, back, unit.backward_s)
        loud = exposed(hardware, back + scatter, unit.backward_s)
        added = passes.count * (times * there + (times - reduces) * quiet + reduces * loud)
    ends = times * gather_s(passes.ends) + reduces * scatter_s(passes.ends)
    items = [
        Item(
            "communication", "weights and gradients of blocks", added,
            "{} passes × {} units: all-gather {:.3f} ms, overlapping {:.3f} forward; again, and "
            "reduce-scatter {:.3f}, overlapping {:.3f} backward; collectives take {:.0%} of the SMs",
            (
                times, passes.count, gather * 1e3, unit.forward_s * 1e3, scatter * 1e3, unit.backward_s * 1e3,
                taken(hardware),
            ),
        ),
        Item(
            "communication", "weights and gradients of embedding and head", ends,
            "{:.3g} parameters, without overlap", (passes.ends,),
        ),
    ]  # fmt: skip
    if layout.replica_size is not None:  # hybrid: once per step, the replicas' shards are all-reduced
        copies = Group(layout.token_ranks // layout.replica_size, max(1, group.per_node // layout.replica_size))
        all_parameters = (passes.count * unit.parameters + passes.ends) * passes.trained
        each = stack.gradient if layout.compress == "none" else 4 * compressed
        num_bytes = all_parameters * each / layout.replica_size
        one = collective_s(hardware, "all_reduce", copies, num_bytes)
        added = exposed(hardware, one, passes.count * unit.backward_s)
        formula = "all_reduce of {:.3g} bytes over {} replicas takes {:.2f} ms, overlapping the last backward pass"
        items.append(
            Item("communication", "gradients of the replicas", added, formula, (num_bytes, copies.size, one * 1e3))
        )
    return items


def exposed(hardware: Hardware, communication: float, computation: float) -> float:
    """Seconds that communication adds to overlapping computation: the excess, and the SMs that it occupies."""
    return max(0.0, communication - computation) + taken(hardware) * min(communication, computation)


def taken(hardware: Hardware) -> float:
    """Share of the SMs that NCCL occupies while it communicates."""
    return min(0.5, CHANNELS / hardware.num_sms) if hardware.num_sms else 0.0
