"""How a model is distributed: the strategy, its degrees and everything else that memory and time depend on."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from dtrain.config import mesh
from dtrain.config.hardware import gpus_per_node, ranks_per_node
from dtrain.strategies.stage_layout import MOST_PASSES, stages_of_rank

SERVED = ("sync", "async", "bounded")  # modes of strategy=ps, which its `data` says
PRECISIONS = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}


@dataclass(frozen=True)
class Layout:
    """One way to train. The degrees multiply to the world size; a data rank runs micro_batches passes per step.

    The defaults of stream, compile and the fused settings match the software of published tables, and dtrain when the
    first rows of benchmarks/planner were measured; `layout_of` returns the current meaning of a configuration.
    """

    strategy: str  # ddp fsdp zero1 zero2 zero3 fairscale local_sgd diloco horovod ring ps tensor pipeline 3d
    tp: int = 1
    pp: int = 1
    dp: int = 1
    micro_batch_size: int = 1
    micro_batches: int = 1  # per data rank and step: gradient accumulation, or pipeline micro-batches
    # how data ranks shard: ddp | fsdp | grad_op | zero1 | zero2 | zero3 | oss | sharded_ddp | one of SERVED
    data: str = "ddp"
    replica_size: int | None = None  # fsdp hybrid: ranks per copy of the model; None: all dp ranks
    schedule: str = "1f1b"  # gpipe | 1f1b | interleaved_1f1b | zbv
    stages_per_rank: int = 1
    sequence_parallel: bool = False
    loss_parallel: bool = False
    activation_checkpointing: str = "none"  # none | ops | selective | full
    activation_checkpointing_every: int = 2
    offload: str = "none"  # optimizer state (fsdp: also weights and gradients): none | cpu | nvme
    offload_params: str = "none"
    precision: str = "bf16"  # bf16 | bf16-pure | fp8 | fp16 | fp32
    stream: str = "float32"  # dtype of the residual stream
    compile: str = "none"  # none | blocks | whole
    # each large matmul of a compiled graph uses the fastest kernel and returns fp32 weight gradients; a chunked head
    # does so without compilation too, which is not modeled
    fast_products: bool = False
    cuda_graph: bool = False  # a launch-bound step is captured as a CUDA graph (strategies/cuda_graph.py)
    fused_loss: bool = False  # head and loss are one operation that never materializes all logits
    optimizer: str = "adamw"  # adamw | sgd | lion | rmsprop | muon | adafactor
    state: str = ""  # how AdamW's moments are held: fp32 | bf16 | int8; "": as the weights
    moments: int = 2  # tensors of the optimizer for each weight, with their average; muon: of matrices
    fused_update: bool = False  # one kernel clips and updates
    bucket_mb: int = 25
    compress: str = "none"  # gradients of ddp, and of the replicas of hybrid fsdp: comm/compress.py
    compress_rank: int = 4
    compress_ratio: float = 0.01
    every: int = 4  # steps between two exchanges of the weights, under local_sgd and diloco
    exchange: str = "fp32"  # what diloco sends: fp32 | int8
    cp: int = 1  # ranks that divide each sequence
    cp_kind: str = "ring"  # ring | allgather | ulysses: how attention sees the other ranks' parts

    @property
    def world_size(self) -> int:
        return self.tp * self.pp * self.cp * self.dp

    @property
    def token_ranks(self) -> int:
        """Ranks with different tokens, over which gradients are averaged and weights are sharded."""
        return self.dp * self.cp

    @property
    def waits_for_host(self) -> bool:
        return not self.cuda_graph or self.micro_batches > MOST_PASSES

    @property
    def global_batch_size(self) -> int:
        return self.dp * self.micro_batch_size * self.micro_batches


def layout_of(config: Mapping[str, Any]) -> Layout:
    """Return the layout of a composed configuration, with degrees and batch filled in. ValueError: it is invalid."""
    from dtrain.config.mesh import batch_sizes  # 20 ms of imports that a search over layouts does not need

    strategy, cluster = config["strategy"], config["cluster"]
    name = config["choices"]["strategy"]
    node_size = ranks_per_node(cluster)
    most = cluster.get("gpus_per_node") or config["hardware"].get("gpus_per_node")
    sizes = mesh.of_strategy(strategy, cluster["nodes"] * node_size, node_size, most=most)
    _, micro, micro_batches = batch_sizes(dict(config), sizes)
    schedule, ranks = strategy.get("schedule", "1f1b"), sizes.world_size
    is_alone = holds_all(strategy, ranks)
    is_whole = is_alone or (ranks == 1 and str(strategy["_target_"]).endswith(".DDP"))
    replica_size = (strategy.get("replica_size") or node_size) if strategy.get("sharding") == "hybrid" else None
    return Layout(
        strategy=name,
        tp=sizes.tp,
        pp=sizes.pp,
        dp=sizes.dp,
        cp=sizes.cp,
        cp_kind=strategy.get("cp_kind", "ring"),
        micro_batch_size=micro,
        micro_batches=micro_batches,
        data="ddp" if is_alone else data_of(strategy),
        replica_size=None if replica_size == sizes.token_ranks else replica_size,
        schedule=schedule,
        stages_per_rank=len(stages_of_rank(0, sizes.pp, schedule, strategy.get("stages_per_rank", 2))[0]),
        sequence_parallel=bool(strategy.get("sequence_parallel")) and sizes.tp > 1,
        loss_parallel=bool(strategy.get("loss_parallel")) and sizes.tp > 1,
        activation_checkpointing=config["activation_checkpointing"],
        activation_checkpointing_every=config["activation_checkpointing_every"],
        offload=strategy.get("offload", "none"),
        offload_params=strategy.get("offload_params", "none"),
        precision=precision_of(config["precision"]),
        stream=config["precision"].get("stream", "float32"),
        compile=(compiled := compile_of(config, ranks)),
        fast_products=compiled != "none" and on_gpu(config) and sizes.tp == 1 and not config["deterministic"],
        cuda_graph=is_whole and compiled != "none" and on_gpu(config) and is_recorded(config),
        fused_loss=on_gpu(config) if (fused := config.get("fused_loss", "auto")) == "auto" else fused,
        optimizer=(optimizer := str(config["optim"]["_target_"]).rpartition(".")[2]),
        moments=moments_of(config["optim"]) + bool((config.get("ema") or {}).get("decay")),
        state=config["optim"].get("state") or "" if optimizer == "adamw" else "",
        fused_update=optimizer == "adamw" and on_gpu(config) and (is_alone or updates_itself(strategy)),
        bucket_mb=25 if (bucket_mb := strategy.get("bucket_mb", 25)) == "auto" else bucket_mb,
        compress=strategy.get("compress", "none"),
        compress_rank=strategy.get("compress_rank", 4),
        compress_ratio=strategy.get("compress_ratio", 0.01),
        every=strategy.get("every", 1),
        exchange=strategy.get("exchange", "fp32"),
    )


def moments_of(optim: Mapping[str, Any]) -> int:
    """Return how many tensors like the weight an optimizer keeps for each. A user's own counts as AdamW."""
    momentum = 0 if optim.get("momentum") == 0 else 1
    known = {"sgd": momentum, "lion": 1, "muon": 1, "rmsprop": 1 + momentum, "adafactor": 0}
    return known.get(str(optim["_target_"]).rpartition(".")[2], 2)


def on_gpu(config: Mapping[str, Any]) -> bool:
    """Will the ranks have GPUs? According to the hardware settings; if there are none, by this machine's GPUs."""
    hardware = config.get("hardware") or {}
    if any(hardware.get(key) for key in ("gpu", "gpu_memory_gib", "usable_memory_gib")):
        return True
    return config["choices"].get("hardware", "unknown") == "unknown" and gpus_per_node(config["cluster"]) > 0


def precision_of(section: Mapping[str, Any]) -> str:
    """Name a section of conf/precision by its content: its file name may be the user's own."""
    if section.get("parameters", "float32") != "float32":
        return "bf16-pure"
    return "fp8" if section.get("float8", "none") != "none" else PRECISIONS[section.get("dtype", "float32")]


def compile_of(config: Mapping[str, Any], ranks: int) -> str:
    """none, blocks or whole, following strategies/compile.compile_mode and the strategies."""
    wanted, strategy = config["compile"], config["strategy"]
    is_alone = holds_all(strategy, ranks)
    # strategies with collectives or hooks between layers are compiled per block
    by_block = bool({"stage", "sharding", "tp", "schedule"} & set(strategy)) and not is_alone
    by_block = by_block or strategy.get("cp", 1) > 1
    if wanted == "auto":
        split = strategy.get("schedule") == "zbv"
        wanted = on_gpu(config) and not split and (is_alone or strategy.get("stage") != 3)
    if wanted is True and config["activation_checkpointing"] != "none" and ranks > 1:
        wanted = "blocks"
    if wanted in (True, "whole"):
        return "blocks" if by_block else "whole"
    return str(wanted or "none")


def is_recorded(config: Mapping[str, Any]) -> bool:
    """Mirrors Strategy.can_be_recorded."""
    usual = config["precision"].get("dtype") != "float16" and str(config["optim"]["_target_"]).endswith(".adamw")
    return usual and config["model"].get("task") != "mlm" and config.get("cuda_graphs", "none") == "auto"


def updates_itself(strategy: Mapping[str, Any]) -> bool:
    """DeepSpeed and fairscale clip themselves; offloaded parameters are updated on the host."""
    return not {"stage", "mode"} & set(strategy) and strategy.get("offload", "none") == "none"


def holds_all(strategy: Mapping[str, Any], ranks: int) -> bool:
    """Is it fsdp or ZeRO on one rank? Nothing to shard, so it runs as ddp, except with DeepSpeed's own settings."""
    offloads = {strategy.get("offload", "none"), strategy.get("offload_params", "none")} != {"none"}
    return (
        ranks == 1
        and bool({"stage", "sharding"} & set(strategy))
        and not (offloads or strategy.get("deepspeed_config"))
    )


def data_of(strategy: Mapping[str, Any]) -> str:
    """How the data ranks of a strategy shard weights, gradients and optimizer state."""
    if "stage" in strategy:
        return f"zero{strategy['stage']}"
    if "sharding" in strategy:
        return "grad_op" if strategy["sharding"] == "grad_op" else "fsdp"
    if "mode" in strategy:
        return str(strategy["mode"])
    return str(strategy.get("data", "ddp"))
