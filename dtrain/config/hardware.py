"""What a node is made of and how fast it should be: reference values for measurements and predictions.

conf/hardware/ holds the values with their sources; unknown.yaml documents each field. None means unknown: it is then
neither compared with a measurement nor used for a prediction.
"""

from __future__ import annotations

import functools
import os
import re
import socket
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from dtrain.config.files import section
from dtrain.errors import bad


class Hardware:
    """One node: its GPUs, its links and its network. Rates in GB/s are 10^9 bytes, sizes in GiB 2^30."""

    def __init__(
        self,
        gpu: str | None = None,
        gpu_memory_gib: float | None = None,
        usable_memory_gib: float | None = None,
        num_sms: int | None = None,
        l2_mib: float | None = None,
        peak_bf16_tflops: float | None = None,
        peak_fp32_tflops: float | None = None,
        matmul_tflops: float | None = None,
        memory_gb_s: float | None = None,
        stream_gb_s: float | None = None,
        launch_us: float | None = None,
        kernel_us: float | None = None,
        gpus_per_node: int | None = None,
        nvlink_busbw_gb_s: float | None = None,
        gather_busbw_gb_s: float | None = None,
        nvlink_max_gb_s: float | None = None,
        gather_max_gb_s: float | None = None,
        collective_us: float | None = None,
        nvlink_latency_us: float | None = None,
        network_busbw_gb_s: float | None = None,
        network_max_gb_s: float | None = None,
        network_rail_gb_s: float | None = None,
        network_latency_us: float | None = None,
        pcie_gb_s: float | None = None,
        host_memory_gib: float | None = None,
        cpu_adam_gb_s: float | None = None,
        price_per_gpu_hour: float | None = None,
        calibration: float | None = None,
        source: str = "",
    ) -> None:
        self.gpu = gpu
        self.gpu_memory_gib = gpu_memory_gib
        self.usable_memory_gib = usable_memory_gib
        self.num_sms = num_sms
        self.l2_mib = l2_mib
        self.peak_bf16_tflops = peak_bf16_tflops
        self.peak_fp32_tflops = peak_fp32_tflops
        self.matmul_tflops = matmul_tflops
        self.memory_gb_s = memory_gb_s
        self.stream_gb_s = stream_gb_s
        self.launch_us = launch_us
        self.kernel_us = kernel_us
        self.gpus_per_node = gpus_per_node
        self.nvlink_busbw_gb_s = nvlink_busbw_gb_s
        self.gather_busbw_gb_s = gather_busbw_gb_s
        self.nvlink_max_gb_s = nvlink_max_gb_s
        self.gather_max_gb_s = gather_max_gb_s
        self.collective_us = collective_us
        self.nvlink_latency_us = nvlink_latency_us
        self.network_busbw_gb_s = network_busbw_gb_s
        self.network_max_gb_s = network_max_gb_s
        self.network_rail_gb_s = network_rail_gb_s
        self.network_latency_us = network_latency_us
        self.pcie_gb_s = pcie_gb_s
        self.host_memory_gib = host_memory_gib
        self.cpu_adam_gb_s = cpu_adam_gb_s
        self.price_per_gpu_hour = price_per_gpu_hour
        self.calibration = calibration
        self.source = source
        for name, value in vars(self).items():
            if isinstance(value, (int, float)) and not (value > 0 or (value == 0 and name == "price_per_gpu_hour")):
                raise bad(
                    f"hardware.{name}", value, "must be more than 0, or null for not known", f"hardware.{name}=null"
                )


# The driver's name of a GPU ("NVIDIA A100-SXM4-80GB") → its file in conf/hardware; the first match counts. PCIe cards
# have lower clocks, fewer SMs and no NVSwitch: no file describes them.
OTHERS = r"PCIe|NVL\b|Laptop"
NAMES = (
    (r"\bB200\b", "b200"),
    (r"\bH200\b", "h200"),
    (r"\bH100\b", "h100"),
    (r"\bA100\b.*\b80GB", "a100-80gb"),
    (r"\bA100\b", "a100-40gb"),
    (r"\bV100\b.*\b16GB", "v100-16gb"),
    (r"\bV100\b", "v100"),
    (r"\bL4\b", "l4"),
    (r"\bRTX 4090\b(?! D)", "rtx4090"),
)
WITHOUT_BF16 = r"\b(P100|V100|T4)\b"  # older than Ampere: use fp16 for 16-bit matmuls there
DRIVER = Path("/proc/driver/nvidia/gpus")
CPU_INFO = Path("/proc/cpuinfo")
CPU_FP16 = "DTRAIN_CPU_FP16"  # 1 or 0 fakes the CPU's fp16 support in tests; 1 also overrides DeepSpeed's own check


def detect() -> str | None:
    """Name the conf/hardware file for this machine, by its first GPU; `cpu` without a GPU, None for an unknown GPU.

    Needs no torch and, if the driver's /proc files are readable, no subprocess: every launch calls it.
    """
    if count_gpus() == 0:
        return "cpu"
    name = driver_name(DRIVER) or smi_name()
    return None if name is None else option_of(name)


def option_of(name: str) -> str | None:
    """Name the conf/hardware option for a GPU, given the driver's name; None: there is no such option."""
    if re.search(OTHERS, name, re.IGNORECASE):
        return None
    return next((option for pattern, option in NAMES if re.search(pattern, name)), None)


def half_precision(gpu: str | None) -> str | None:
    """Name the conf/precision option for 16 bits that is fast on this GPU; None without a GPU."""
    return None if not gpu else "fp16" if re.search(WITHOUT_BF16, gpu) else "bf16"


def cpu_has_fp16() -> bool:
    """Whether DeepSpeed accepts fp16 on this CPU. DeepSpeed asks torch whether oneDNN has fp16 kernels for the CPU."""
    fake = fake_cpu_fp16()
    known = fp16_by_flags(cpu_flags(CPU_INFO)) if fake is None else fake
    return torch_has_fp16() if known is None else known


def fake_cpu_fp16() -> bool | None:
    """Return the fake value that a test sets; None: not set."""
    return {"1": True, "0": False}.get(os.environ.get(CPU_FP16, ""))


def cpu_flags(path: Path) -> set[str]:
    """Return the instruction sets that Linux lists for an x86 CPU; empty for another CPU or OS."""
    try:
        found = re.search(r"^flags\s*:(.*)$", path.read_text(encoding="utf-8"), re.MULTILINE)
    except OSError:
        return set()
    return set(found[1].split()) if found else set()


def fp16_by_flags(flags: set[str]) -> bool | None:
    """Apply oneDNN's rule (platform.cpp, has_data_type_support) to the flags that Linux lists; None: undecided.

    AVX512-FP16 with BF16 and AVX-VNNI; or AVX-VNNI, AVX-VNNI-INT8 and AVX-NE-CONVERT, of which Linux lists only the
    first. A CPU that is not x86 has none of these flags, and torch reports False for it.
    """
    if "avx_vnni" not in flags:
        return False
    return True if {"avx512_fp16", "avx512_bf16"} <= flags else None


@functools.cache
def torch_has_fp16() -> bool:
    """Ask torch in a subprocess (2 s). Without an answer assume support: the ranks check again."""
    code = "import torch; print(torch.ops.mkldnn._is_mkldnn_fp16_supported())"
    try:
        answer = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300).stdout
    except (OSError, subprocess.TimeoutExpired):
        answer = ""
    return answer.strip() != "False"


def no_cpu_fp16(strategy: str) -> ValueError:
    """Return the error that the launcher raises, or a rank on a node that the launcher cannot inspect."""
    rule = (
        f"strategy={strategy} is DeepSpeed's, which takes fp16 on a CPU only with fp16 instructions (AVX512-FP16), "
        f"and the CPU of {socket.gethostname()} has none"
    )
    return bad("precision", "fp16", rule, "precision=bf16, or strategy=fsdp")


def driver_name(folder: Path) -> str | None:
    """Read the first GPU's name from the driver's files (`Model: NVIDIA H200`); None if there are none."""
    for path in sorted(folder.glob("*/information")):
        try:
            found = re.search(r"^Model:\s*(.+?)\s*$", path.read_text(encoding="utf-8"), re.MULTILINE)
        except OSError:
            continue
        if found:
            return found[1]
    return None


@functools.cache  # a launch calls it more than once
def smi_name(run: Callable[..., subprocess.CompletedProcess[str]] = subprocess.run) -> str | None:
    """Get the name from nvidia-smi, for containers in which /proc hides the driver."""
    command = ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"]
    if visible := os.environ.get("CUDA_VISIBLE_DEVICES"):
        command += ["--id=" + visible.split(",")[0]]
    try:
        answer = run(command, capture_output=True, text=True, timeout=15)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return answer.stdout.strip().partition("\n")[0] or None if answer.returncode == 0 else None


def load(name: str, **values: Any) -> Hardware:
    """Load conf/hardware/NAME.yaml; `values` replace single values."""
    known = {key: value for key, value in section("hardware", name).items() if key != "_target_"}
    return Hardware(**known | values)


def world_size(config: Any) -> int:
    return int(config["cluster"]["nodes"] * config["cluster"]["processes"])


def gpus_per_node(cluster: Mapping[str, Any]) -> int:
    """GPUs per node: the cluster's setting, or those of this machine."""
    return int(cluster["gpus_per_node"]) if "gpus_per_node" in cluster else count_gpus()


def ranks_per_node(cluster: Mapping[str, Any]) -> int:
    """cluster.processes, or its default: one per GPU; without GPUs 2 on this machine and 1 on a cluster."""
    return int(cluster.get("processes") or gpus_per_node(cluster) or (1 if "gpus_per_node" in cluster else 2))


def count_gpus() -> int:
    """Count the GPUs that a process started here would see, without importing torch."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    # not Path.glob, which takes longer: a search asks thousands of times
    present = sum(1 for name in os.listdir("/dev") if name.startswith("nvidia") and name[6:].isdigit())
    if visible is None:
        return present
    return min(present, len([d for d in visible.split(",") if d.strip() not in ("", "-1")]))


def count_cores() -> int:
    """Count the cores that a process started here may use; macOS does not tell which."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
