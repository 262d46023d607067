"""How a model is spread: the strategy, its degrees and everything else that memory and time depend on."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from dtrain import mesh
from dtrain.config import ranks_per_node
from dtrain.strategies.rules import stages_of_rank

PRECISIONS = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}


@dataclass(frozen=True)
class Layout:
    """One way to train. The degrees multiply to the world size; a data rank makes micro_batches passes a step."""

    strategy: str  # ddp fsdp zero1 zero2 zero3 fairscale local_sgd tensor pipeline 3d
    tp: int = 1
    pp: int = 1
    dp: int = 1
    micro_batch_size: int = 1
    micro_batches: int = 1  # per data rank and step: accumulation, or what flows through a pipeline
    data: str = "ddp"  # how data ranks share: ddp | fsdp | grad_op | zero1 | zero2 | zero3 | oss | sharded_ddp
    replica_size: int | None = None  # fsdp hybrid: so many ranks hold one copy of the model; None: all dp ranks
    schedule: str = "1f1b"  # gpipe | 1f1b | interleaved_1f1b | zbv
    stages_per_rank: int = 1
    sequence_parallel: bool = False
    loss_parallel: bool = False
    activation_checkpointing: str = "none"  # none | full | selective
    activation_checkpointing_every: int = 2
    offload: str = "none"  # optimizer state (fsdp: weights and gradients, too): none | cpu | nvme
    offload_params: str = "none"
    precision: str = "bf16"  # bf16 | fp16 | fp32
    compile: bool = False
    optimizer: str = "adamw"  # adamw | sgd
    bucket_mb: int = 25

    @property
    def world_size(self) -> int:
        return self.tp * self.pp * self.dp

    @property
    def global_batch_size(self) -> int:
        return self.dp * self.micro_batch_size * self.micro_batches


def layout_of(config: Mapping[str, Any]) -> Layout:
    """The layout that a composed configuration means, its degrees and batch filled in. ValueError: none is meant."""
    from dtrain.validate import batch_sizes  # 20 ms of imports that a search over layouts does not need

    strategy, cluster = config["strategy"], config["cluster"]
    name = config["choices"]["strategy"]
    node_size = ranks_per_node(cluster)
    axes = {axis: strategy.get(axis, default) for axis, default in (("pp", 1), ("dp", -1), ("tp", 1))}
    sizes = mesh.resolve(cluster["nodes"] * node_size, node_size, **axes)
    _, micro, micro_batches = batch_sizes(dict(config), sizes)
    schedule = strategy.get("schedule", "1f1b")
    replica_size = (strategy.get("replica_size") or node_size) if strategy.get("sharding") == "hybrid" else None
    return Layout(
        strategy=name,
        tp=sizes.tp,
        pp=sizes.pp,
        dp=sizes.dp,
        micro_batch_size=micro,
        micro_batches=micro_batches,
        data=data_of(strategy),
        replica_size=None if replica_size == sizes.dp else replica_size,
        schedule=schedule,
        stages_per_rank=len(stages_of_rank(0, sizes.pp, schedule, strategy.get("stages_per_rank", 2))[0]),
        sequence_parallel=bool(strategy.get("sequence_parallel")) and sizes.tp > 1,
        loss_parallel=bool(strategy.get("loss_parallel")) and sizes.tp > 1,
        activation_checkpointing=config["activation_checkpointing"],
        activation_checkpointing_every=config["activation_checkpointing_every"],
        offload=strategy.get("offload", "none"),
        offload_params=strategy.get("offload_params", "none"),
        precision=PRECISIONS[config["precision"].get("dtype", "float32")],
        compile=config["compile"],
        optimizer=str(config["optim"]["_target_"]).rpartition(".")[2],
        bucket_mb=strategy.get("bucket_mb", 25),
    )


def data_of(strategy: Mapping[str, Any]) -> str:
    """How the data ranks of a strategy's section share weights, gradients and optimizer state."""
    if "stage" in strategy:
        return f"zero{strategy['stage']}"
    if "sharding" in strategy:
        return "grad_op" if strategy["sharding"] == "grad_op" else "fsdp"
    if "mode" in strategy:
        return str(strategy["mode"])
    return str(strategy.get("data", "ddp"))
