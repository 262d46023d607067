"""Combine memory, step time and cost of one configuration: a row of `dtrain plan`."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from dtrain.config.build import build
from dtrain.config.hardware import Hardware, ranks_per_node
from dtrain.plan.layout import Layout, layout_of
from dtrain.plan.ledger import MEMORY_PARTS, TIME_PARTS, Item, by_part, total
from dtrain.plan.memory.activations import GIB as GIB
from dtrain.plan.memory.activations import product_bytes
from dtrain.plan.memory.states import gradient_bytes, held_whole, optimizer_bytes, sharing, weight_bytes
from dtrain.plan.model_shape import Shape, Transformer, shape_of
from dtrain.plan.parameters import flops_per_sample

# The network between nodes if the hardware file defines none: InfiniBand of the GPU's generation, one adapter per GPU;
# Ethernet for smaller GPUs. A note reports the assumption.
NETWORKS = {
    "A100": "selene", "H100": "h100-ndr", "H200": "h200-ib", "B200": "aws-p6-b200", "V100": "dgx-2", "L4": "gcp-a2",
    "4090": "gcp-a2",
}  # fmt: skip
HOST_SHARE = 0.85  # of a node's memory: the rest is for the system, the ranks' processes and data loading
USABLE = 0.98  # of the nominal memory, if a hardware file does not define what torch can use
TIE = 1.01  # step times this close count as equal: the prediction is not more accurate
TIGHT = 0.04  # of a card: with less room, another process or fragmentation can end the run


@dataclass(frozen=True)
class Task:
    """What all layouts of one request share: the model, the nodes, the batch and the length of the run."""

    shape: Shape
    hardware: Hardware
    global_batch_size: int
    tokens_per_sample: int  # 1 if a sample has one target: an image, a text to classify
    flops_per_sample: float  # forward and backward, without recomputation
    samples: float  # in the whole run
    stack: str | None = None  # whose software is timed, a name in time/stack.py; None: ours

    @property
    def unit(self) -> str:
        return "tokens" if self.tokens_per_sample > 1 else "samples"

    @property
    def limit(self) -> float | None:
        """Bytes of a GPU that torch and everything beside it can use; None: unknown, or a CPU."""
        sold, usable = self.hardware.gpu_memory_gib, self.hardware.usable_memory_gib
        return usable * GIB if usable else sold * USABLE * GIB if sold else None


@dataclass(frozen=True)
class Prediction:
    """The prediction for one layout. Bytes and seconds are those of the fullest and the slowest rank."""

    layout: Layout
    memory: list[Item]  # bytes
    time: list[Item] | None  # seconds of a step; None: the hardware is not known well enough
    task: Task
    reserve: float = 0.0  # bytes that the driver, NCCL and the allocator take in addition

    @property
    def memory_bytes(self) -> float:
        """Peak bytes that the allocator must hold; comparable with the measured peak_mem_gib in a summary."""
        return total(self.memory)

    @property
    def room(self) -> float | None:
        """Bytes left on the fullest GPU, negative if it does not fit; None: its memory is unknown."""
        limit = self.task.limit
        return None if limit is None else limit - self.memory_bytes - self.reserve

    @property
    def tight(self) -> bool:
        """Does it fit with almost no room left on the fullest GPU?"""
        room, limit = self.room, self.task.limit
        return room is not None and limit is not None and 0 <= room < TIGHT * limit

    @property
    def host_room(self) -> float | None:
        """Bytes left in a node's host memory after offloading; None: no offload, or its memory is unknown."""
        layout, hardware = self.layout, self.task.hardware
        if "cpu" not in (layout.offload, layout.offload_params) or not hardware.host_memory_gib:
            return None
        ranks = min(layout.world_size, hardware.gpus_per_node or layout.world_size)
        return hardware.host_memory_gib * HOST_SHARE * GIB - ranks * host_bytes(self.task.shape, layout)

    @property
    def fits(self) -> bool | None:
        """None: a required memory size is unknown, the GPU's or, with offload, the node's."""
        host, room = self.host_room, self.room
        if (host is not None and host < 0) or (room is not None and room < 0):
            return False
        offloads = "cpu" in (self.layout.offload, self.layout.offload_params)
        return None if room is None or (offloads and host is None) else True

    @property
    def step_s(self) -> float | None:
        return None if self.time is None else total(self.time)

    @property
    def tokens_per_s(self) -> float | None:
        """Tokens per second over all GPUs, or samples if a sample has one target."""
        per_step = self.task.global_batch_size * self.task.tokens_per_sample
        return per_step / self.step_s if self.step_s else None

    @property
    def mfu(self) -> float | None:
        """Share of the GPUs' 16-bit peak that the model's own FLOPs use, like in a run's metrics."""
        peak = self.task.hardware.peak_bf16_tflops
        if not self.step_s or not peak:
            return None
        flops = self.task.flops_per_sample * self.task.global_batch_size
        return flops / self.step_s / (peak * 1e12 * self.layout.world_size)

    @property
    def run_s(self) -> float | None:
        """Seconds of the whole run's steps, without startup, saving and evaluation."""
        return self.step_s * self.task.samples / self.task.global_batch_size if self.step_s else None

    @property
    def gpu_hours(self) -> float | None:
        return self.run_s * self.layout.world_size / 3600 if self.run_s else None

    @property
    def cost(self) -> float | None:
        """Money for the run, in the currency of hardware.price_per_gpu_hour."""
        price = self.task.hardware.price_per_gpu_hour
        return self.gpu_hours * price if self.gpu_hours is not None and price is not None else None

    def row(self) -> dict[str, Any]:
        """Return the object for `--json` and plan.json."""
        layout, limit = self.layout, self.task.limit
        memory: dict[str, float | None] = {
            part: value / GIB for part, value in by_part(self.memory, MEMORY_PARTS).items()
        }
        memory |= {"reserve": self.reserve / GIB, "limit": None if limit is None else limit / GIB}
        return {
            "strategy": layout.strategy,
            "tp": layout.tp,
            "pp": layout.pp,
            "dp": layout.dp,
            **({"cp": layout.cp, "cp_kind": layout.cp_kind} if layout.cp > 1 else {}),
            "micro_batch_size": layout.micro_batch_size,
            "activation_checkpointing": layout.activation_checkpointing,
            "fits": self.fits,
            "memory_gib": memory,
            "step_s": None if self.time is None else by_part(self.time, TIME_PARTS),
            "tokens_per_s": self.tokens_per_s,
            "mfu": self.mfu,
            "run_s": self.run_s,
            "gpu_hours": self.gpu_hours,
            "cost": self.cost,
            "world_size": layout.world_size,
            "micro_batches": layout.micro_batches,
            "data": layout.data,
            "replica_size": layout.replica_size,
            "schedule": layout.schedule if layout.pp > 1 else None,
            "stages_per_rank": layout.stages_per_rank,
            "sequence_parallel": layout.sequence_parallel,
            "loss_parallel": layout.loss_parallel,
            "offload": layout.offload,
            "offload_params": layout.offload_params,
            "precision": layout.precision,
            "compile": layout.compile,
            "fused_loss": layout.fused_loss,
            "unit": self.task.unit,
        }


def host_bytes(shape: Shape, layout: Layout) -> float:
    """Bytes of one rank in its node's memory with CPU offload. No strategy with a pipeline offloads.

    fsdp: all its weights, gradients and optimizer state. ZeRO: its share of fp32 master weights, moments and gradients;
    with offloaded parameters also the 16-bit weights. Frozen weights have no gradients and no state.
    """
    held, share, size = held_whole(shape, layout), sharing(layout), 0.0
    if layout.offload == "cpu" and share.zero:
        size += optimizer_bytes(held, layout) + 4 * held.trained / share.optimizer
    elif layout.offload == "cpu":
        size += weight_bytes(held, layout) + gradient_bytes(held, layout) + optimizer_bytes(held, layout)
    if layout.offload_params == "cpu":
        size += product_bytes(layout.precision) * held.parameters / share.weights
    return size


def predict(config: Mapping[str, Any]) -> Prediction | None:
    """Predict a composed configuration; None if the model or the hardware is unknown: see `why_not`."""
    task = task_of(config)
    return None if task is None else predict_layout(layout_of(config), task)


def why_not(config: Mapping[str, Any]) -> str:
    """Explain why nothing can be predicted, in a sentence; "" if a prediction is possible."""
    if shape_of(config) is None:
        name = config["choices"].get("model")
        return f"model={name} is not one of dtrain's: its sizes are not known without building it"
    if hardware_of(config) is None:
        return f"hardware={config['choices'].get('hardware')}: nothing is known about its GPUs"
    return ""


def hardware_of(config: Mapping[str, Any]) -> Hardware | None:
    """Return the nodes as this run uses them; None if neither the GPUs' memory nor their rate is known."""
    section = dict(config["hardware"])
    used, there = ranks_per_node(config["cluster"]), section.get("gpus_per_node") or 0
    if there and used != there:
        section["gpus_per_node"] = used
        for key in ("network_busbw_gb_s", "network_max_gb_s"):  # adapters belong to GPUs: fewer GPUs use fewer
            section[key] = section[key] and section[key] * min(1.0, used / there)
    hardware = build(section | assumed_network(config))
    assert isinstance(hardware, Hardware)
    return hardware if hardware.gpu_memory_gib or hardware.matmul_tflops else None


def assumed_network(config: Mapping[str, Any]) -> dict[str, float]:
    """Return the usual network for these GPUs if none is given, scaled to the used GPUs of a node."""
    section = config["hardware"]
    if config["cluster"]["nodes"] == 1 or section.get("network_max_gb_s") or section.get("network_busbw_gb_s"):
        return {}
    name = usual_network(config)
    if name is None:
        return {}
    from dtrain.config.files import section as read

    other = read("hardware", name)
    share = ranks_per_node(config["cluster"]) / (other.get("gpus_per_node") or 8)
    whole = {key: other[key] * share for key in ("network_busbw_gb_s", "network_max_gb_s") if other.get(key)}
    return whole | {key: other[key] for key in ("network_rail_gb_s", "network_latency_us")}


def usual_network(config: Mapping[str, Any]) -> str | None:
    """Name the conf/hardware file with the usual network of nodes with these GPUs; None: unknown GPU."""
    gpu = str(config["hardware"].get("gpu"))
    return next((name for word, name in NETWORKS.items() if re.search(rf"\b{word}\b", gpu)), None)


def task_of(config: Mapping[str, Any], tokens: float | None = None) -> Task | None:
    """Return what all layouts of a configuration share; None: unknown model or hardware. tokens: of the whole run."""
    shape, hardware = shape_of(config), hardware_of(config)
    if shape is None or hardware is None:
        return None
    batch, per_sample = config["train"]["global_batch_size"], 1
    if isinstance(shape, Transformer) and shape.task != "classify":
        per_sample = shape.seq_len
    steps = config["train"]["steps"]  # None: train.epochs, of data that the planner does not read
    samples = (math.nan if steps is None else steps * batch) if tokens is None else tokens / per_sample
    return Task(shape, hardware, batch, per_sample, flops_per_sample(shape), samples)


def predict_layout(layout: Layout, task: Task, timed: bool = True) -> Prediction:
    """Predict one layout; timed=False skips the time, e.g. for a layout that does not fit."""
    from dtrain.plan.memory.peak import memory, reserve

    items = memory(task.shape, layout)
    prediction = Prediction(layout, items, None, task, reserve(layout, total(items)))
    return with_time(prediction) if timed else prediction


def with_time(prediction: Prediction) -> Prediction:
    """Add the step time, if the hardware is known well enough."""
    if prediction.time is not None:
        return prediction
    return replace(prediction, time=time_of(prediction.layout, prediction.task))


def time_of(layout: Layout, task: Task) -> list[Item] | None:
    """Step time of a layout, whether it fits or not; None: the hardware is not known well enough."""
    from dtrain.plan.time.stack import STACKS
    from dtrain.plan.time.step import knows_enough, step_time

    if not knows_enough(task.hardware, layout):
        return None
    return step_time(task.shape, layout, task.hardware, None if task.stack is None else STACKS[task.stack])


def least_time_of(layout: Layout, task: Task) -> float:
    """A lower bound of the step time, which takes a tenth as long to find; 0: there is none."""
    from dtrain.plan.time.step import knows_enough, least_time

    if task.stack is not None or not knows_enough(task.hardware, layout):
        return 0.0
    return (1 - 1e-9) * least_time(task.shape, layout, task.hardware)  # rounding
