"""One configuration's memory, step time and cost, brought together: a row of `dtrain plan`."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from dtrain.config import build, ranks_per_node
from dtrain.hardware import Hardware
from dtrain.plan.activations import GIB as GIB
from dtrain.plan.activations import product_bytes
from dtrain.plan.counts import flops_per_sample
from dtrain.plan.layout import Layout, layout_of
from dtrain.plan.ledger import MEMORY_PARTS, TIME_PARTS, Item, by_part, total
from dtrain.plan.shape import Shape, Transformer, shape_of
from dtrain.plan.states import gradient_bytes, held_whole, optimizer_bytes, sharing, weight_bytes

# For several nodes, where the hardware's file says nothing about a network: InfiniBand of the GPU's time, one adapter
# each; Ethernet for GPUs that are not made for more. A remark says which was taken.
NETWORKS = {
    "A100": "selene", "H100": "h100-ndr", "H200": "h200-ib", "B200": "aws-p6-b200", "V100": "dgx-2", "L4": "gcp-a2",
    "4090": "gcp-a2",
}  # fmt: skip
HOST_SHARE = 0.85  # of a node's memory: the rest is for the system, the ranks' own processes and reading data
USABLE = 0.98  # of the memory as it is sold, where a hardware file does not say what torch can have


@dataclass(frozen=True)
class Task:
    """What every layout of one question shares: the model, the nodes, the batch and how long the run is."""

    shape: Shape
    hardware: Hardware
    global_batch_size: int
    tokens_per_sample: int  # 1 where a sample has one target: a picture, a text to classify
    flops_per_sample: float  # forward and backward, without what checkpointing computes twice
    samples: float  # of the whole run
    stack: str | None = None  # whose software is timed, by its name in stacks.py; None: ours

    @property
    def unit(self) -> str:
        return "tokens" if self.tokens_per_sample > 1 else "samples"

    @property
    def limit(self) -> float | None:
        """Bytes of a GPU that torch and all beside it can have; None: not known, or a CPU."""
        sold, usable = self.hardware.gpu_memory_gib, self.hardware.usable_memory_gib
        return usable * GIB if usable else sold * USABLE * GIB if sold else None


@dataclass(frozen=True)
class Prediction:
    """What is expected of one layout. Bytes and seconds are those of the fullest and the slowest rank."""

    layout: Layout
    memory: list[Item]  # bytes
    time: list[Item] | None  # seconds of a step; None: too little is known of the hardware
    task: Task
    reserve: float = 0.0  # bytes that the driver, NCCL and the allocator take beside

    @property
    def memory_bytes(self) -> float:
        """What the allocator must hold at the worst moment: beside the measured peak_mem_gib in a summary."""
        return total(self.memory)

    @property
    def room(self) -> float | None:
        """Bytes left on the fullest GPU, less than 0 when it does not fit; None: its memory is not known."""
        limit = self.task.limit
        return None if limit is None else limit - self.memory_bytes - self.reserve

    @property
    def host_room(self) -> float | None:
        """Bytes left in a node's own memory beside what is offloaded; None: nothing is, or its memory is not known."""
        layout, hardware = self.layout, self.task.hardware
        if "cpu" not in (layout.offload, layout.offload_params) or not hardware.host_memory_gib:
            return None
        ranks = min(layout.world_size, hardware.gpus_per_node or layout.world_size)
        return hardware.host_memory_gib * HOST_SHARE * GIB - ranks * host_bytes(self.task.shape, layout)

    @property
    def fits(self) -> bool | None:
        """None: a memory that it depends on is not known, the GPU's or, with offload, the node's."""
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
        """Tokens a second over all GPUs, or samples where a sample has one target."""
        per_step = self.task.global_batch_size * self.task.tokens_per_sample
        return per_step / self.step_s if self.step_s else None

    @property
    def mfu(self) -> float | None:
        """The share of the GPUs' 16-bit peak that the model's own arithmetic takes, as a run's metrics have it."""
        peak = self.task.hardware.peak_bf16_tflops
        if not self.step_s or not peak:
            return None
        flops = self.task.flops_per_sample * self.task.global_batch_size
        return flops / self.step_s / (peak * 1e12 * self.layout.world_size)

    @property
    def run_s(self) -> float | None:
        """Seconds of the whole run's steps; starting, saving and evaluating are not in it."""
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
        """The object of `--json` and plan.json."""
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
    """Bytes of one rank in its node's memory under offload to the CPU. No strategy with a pipeline offloads.

    fsdp: all that it holds of weights, gradients and optimizer state. ZeRO: its share of masters, moments and float32
    gradients; with its parameters offloaded also the 16-bit weights. Frozen weights have no gradients and no state.
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
    """What is expected of a composed configuration; None when the model or the hardware is not known: `why_not`."""
    task = task_of(config)
    return None if task is None else predict_layout(layout_of(config), task)


def why_not(config: Mapping[str, Any]) -> str:
    """Why nothing can be predicted, in a sentence; "" when it can."""
    if shape_of(config) is None:
        name = config["choices"].get("model")
        return f"model={name} is not one of dtrain's: its sizes are not known without building it"
    if hardware_of(config) is None:
        return f"hardware={config['choices'].get('hardware')}: nothing is known about its GPUs"
    return ""


def hardware_of(config: Mapping[str, Any]) -> Hardware | None:
    """The figures of the nodes as this run uses them; None when neither the GPUs' memory nor their rate is known."""
    section = dict(config["hardware"])
    used, there = ranks_per_node(config["cluster"]), section.get("gpus_per_node") or 0
    if there and used != there:
        section["gpus_per_node"] = used
        for key in ("network_busbw_gb_s", "network_max_gb_s"):  # adapters belong to GPUs: fewer of these use fewer
            section[key] = section[key] and section[key] * min(1.0, used / there)
    hardware = build(section | assumed_network(config))
    assert isinstance(hardware, Hardware)
    return hardware if hardware.gpu_memory_gib or hardware.matmul_tflops else None


def assumed_network(config: Mapping[str, Any]) -> dict[str, float]:
    """Between nodes whose network is not said: what such GPUs usually have, scaled to those of a node that are used."""
    section = config["hardware"]
    if config["cluster"]["nodes"] == 1 or section.get("network_max_gb_s") or section.get("network_busbw_gb_s"):
        return {}
    name = usual_network(config)
    if name is None:
        return {}
    from dtrain.config import section as read

    other = read("hardware", name)
    share = ranks_per_node(config["cluster"]) / (other.get("gpus_per_node") or 8)
    whole = {key: other[key] * share for key in ("network_busbw_gb_s", "network_max_gb_s") if other.get(key)}
    return whole | {key: other[key] for key in ("network_rail_gb_s", "network_latency_us")}


def usual_network(config: Mapping[str, Any]) -> str | None:
    """The file of conf/hardware whose network nodes with these GPUs usually have; None: nothing is known of them."""
    gpu = str(config["hardware"].get("gpu"))
    return next((name for word, name in NETWORKS.items() if re.search(rf"\b{word}\b", gpu)), None)


def task_of(config: Mapping[str, Any], tokens: float | None = None) -> Task | None:
    """What the layouts of a configuration share; None: the model or the hardware is not known. tokens: of the run."""
    shape, hardware = shape_of(config), hardware_of(config)
    if shape is None or hardware is None:
        return None
    batch, per_sample = config["train"]["global_batch_size"], 1
    if isinstance(shape, Transformer) and shape.task != "classify":
        per_sample = shape.seq_len
    samples = config["train"]["steps"] * batch if tokens is None else tokens / per_sample
    return Task(shape, hardware, batch, per_sample, flops_per_sample(shape), samples)


def predict_layout(layout: Layout, task: Task, timed: bool = True) -> Prediction:
    """The prediction for one layout; timed=False leaves out the time, e.g. of what does not fit."""
    from dtrain.plan.memory import memory, reserve

    items = memory(task.shape, layout)
    prediction = Prediction(layout, items, None, task, reserve(layout, total(items)))
    return with_time(prediction) if timed else prediction


def with_time(prediction: Prediction) -> Prediction:
    """The same with its step time, where enough is known of the hardware."""
    if prediction.time is not None:
        return prediction
    return replace(prediction, time=time_of(prediction.layout, prediction.task))


def time_of(layout: Layout, task: Task) -> list[Item] | None:
    """The step time of a layout, whether it fits or not; None: too little is known of the hardware."""
    from dtrain.plan.stacks import STACKS
    from dtrain.plan.step import knows_enough, step_time

    if not knows_enough(task.hardware, layout):
        return None
    return step_time(task.shape, layout, task.hardware, None if task.stack is None else STACKS[task.stack])
