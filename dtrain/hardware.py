"""What a node is made of, and what it should reach: the figures that measurements are held against.

conf/hardware/ holds them with their sources. None is: not known, and then nothing is compared with it.
"""

from __future__ import annotations

from dtrain.config import bad


class Hardware:
    """One node: its GPUs, and the bus bandwidth of collectives inside it and across nodes (at 256 MiB, in GB/s)."""

    def __init__(
        self,
        gpu: str | None = None,
        gpu_memory_gib: float | None = None,
        peak_bf16_tflops: float | None = None,
        memory_gb_s: float | None = None,
        gpus_per_node: int | None = None,
        nvlink_busbw_gb_s: float | None = None,
        gather_busbw_gb_s: float | None = None,
        network_busbw_gb_s: float | None = None,
        source: str = "",
    ) -> None:
        figures = {
            "gpu_memory_gib": gpu_memory_gib,
            "peak_bf16_tflops": peak_bf16_tflops,
            "memory_gb_s": memory_gb_s,
            "gpus_per_node": gpus_per_node,
            "nvlink_busbw_gb_s": nvlink_busbw_gb_s,
            "gather_busbw_gb_s": gather_busbw_gb_s,
            "network_busbw_gb_s": network_busbw_gb_s,
        }
        for name, value in figures.items():
            if value is not None and not value > 0:
                raise bad(
                    f"hardware.{name}", value, "must be more than 0, or null for not known", f"hardware.{name}=null"
                )
        self.gpu = gpu
        self.gpu_memory_gib = gpu_memory_gib
        self.peak_bf16_tflops = peak_bf16_tflops
        self.memory_gb_s = memory_gb_s
        self.gpus_per_node = gpus_per_node
        self.nvlink_busbw_gb_s = nvlink_busbw_gb_s
        self.gather_busbw_gb_s = gather_busbw_gb_s
        self.network_busbw_gb_s = network_busbw_gb_s
        self.source = source
