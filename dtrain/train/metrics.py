"""The metrics of a run: rates, memory, evaluations, and what they are of."""

from __future__ import annotations

import math
import re
import resource
import sys
from typing import Any

import torch

import dtrain
from dtrain.data.loader import Loader
from dtrain.data.stream_loader import StreamLoader
from dtrain.models.layers import eval_metrics

# Peak dense 16-bit matmul FLOP/s from NVIDIA's data sheets. MFU is relative to it.
PEAK_FLOPS = {
    "B200": 2250e12, "H200": 989e12, "H100": 989e12, "A100": 312e12, "V100": 125e12, "L40S": 362e12, "L4": 121e12,
    "4090": 165e12, "T4": 65e12,
}  # fmt: skip


class Rate:
    """Convert step time to tokens per second and MFU. A token is anything that has its own target."""

    def __init__(
        self,
        model: Any,
        data: Loader | StreamLoader,
        batch_size: int,
        device: torch.device,
        dtype: torch.dtype,
        world_size: int,
    ) -> None:
        self.tokens_per_sample = max(1, data.sample()[1].numel())  # samples may have no targets
        self.unit = "tokens" if self.tokens_per_sample > 1 else "samples"  # an image has one target
        self.tokens_per_step = batch_size * self.tokens_per_sample
        self.flops_per_step = batch_size * model.flops_per_sample()
        peak = peak_flops(device, dtype)
        self.peak = peak * world_size if peak else None

    def tokens_per_s(self, step_s: float) -> float:
        return self.tokens_per_step / step_s

    def mfu(self, step_s: float) -> float | None:
        return self.flops_per_step / step_s / self.peak if self.peak else None


def evaluated(model: Any, values: list[float]) -> dict[str, float]:
    """Return an evaluation's metrics by name: the loss, the metrics that the model returns, and perplexity."""
    names = ("loss", *eval_metrics(model))
    found = {f"val_{name}": value for name, value in zip(names, values, strict=True)}
    if math.isnan(found.get("val_top5", 0.0)):  # of 5 classes or fewer (layers.classify)
        del found["val_top5"]
    if getattr(model, "perplexity", False):
        found["val_perplexity"] = math.exp(min(found["val_loss"], 700.0))  # exp overflows a float beyond this
    return found


def peak_flops(device: torch.device, dtype: torch.dtype) -> float | None:
    """Return the device's 16-bit peak, or None (MFU is null) if none is published (CPUs) or the dtype is fp32."""
    if dtype != torch.float32:  # fp32's peak depends on whether TF32 is on
        for word, peak in PEAK_FLOPS.items():
            if re.search(rf"\b{word}\b", device_name(device)):
                return peak
    return None


def device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"


def versions(device: torch.device) -> dict[str, str | None]:
    """Return what computes: for the environment in reports."""
    found = {"dtrain": dtrain.__version__, "torch": torch.__version__, "python": sys.version.split()[0]}
    return found | ({"cuda": torch.version.cuda} if device.type == "cuda" else {})


def memory_gib(device: torch.device) -> float:
    """Return this rank's peak memory: of the CUDA allocator, or of the process on a CPU."""
    if device.type == "cuda":
        # torch.cuda.max_memory_allocated first sorts all hundred allocator statistics: 80 µs more
        stats = torch.cuda.memory_stats_as_nested_dict(device)
        return float(stats["allocated_bytes"]["all"]["peak"]) / 2**30 if stats else 0.0
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 2**30
