"""How a model is spread: the strategy, its degrees and everything else that memory and time depend on."""

from __future__ import annotations

from dataclasses import dataclass


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
    gather_mb: int = 100
    deterministic: bool = True

    @property
    def world_size(self) -> int:
        return self.tp * self.pp * self.dp

    @property
    def global_batch_size(self) -> int:
        return self.dp * self.micro_batch_size * self.micro_batches
