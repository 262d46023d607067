"""A run's output for people and scripts: metrics.jsonl and the metrics in it."""

from __future__ import annotations

import json
import math
import os
import re
import resource
import sys
import time
from pathlib import Path
from typing import Any

import torch

import dtrain
from dtrain.data.loader import Loader
from dtrain.models.layers import eval_metrics
from dtrain.util import disk_space

# Peak dense 16-bit matmul FLOP/s from NVIDIA's data sheets. MFU is relative to it.
PEAK_FLOPS = {
    "B200": 2250e12, "H200": 989e12, "H100": 989e12, "A100": 312e12, "V100": 125e12, "L40S": 362e12, "L4": 121e12,
    "4090": 165e12, "T4": 65e12,
}  # fmt: skip

_encode = json.JSONEncoder(allow_nan=False).encode


class Recorder:
    """Append metrics to metrics.jsonl. On resume, first drop the steps that will be repeated."""

    def __init__(self, run_dir: Path, start_step: int) -> None:
        self.path = run_dir / "metrics.jsonl"
        self.rewind(start_step)

    def rewind(self, step: int) -> None:
        """Drop the lines of later steps."""
        kept = [line for line in _lines(self.path) if line["step"] <= step]
        temporary = self.path.with_name(".metrics.jsonl.tmp")
        temporary.write_text("".join(_dump(line) for line in kept))
        os.replace(temporary, self.path)
        # open until the process ends; line-buffered, so that a reader sees each step immediately
        self.file = open(self.path, "a", buffering=1)  # noqa: SIM115

    def write(self, **values: Any) -> None:
        try:
            self.file.write(_dump(values | {"time": round(time.time(), 3)}))
        except OSError as error:
            raise disk_space.describe(error, Path(self.file.name), 1000) from error


def _lines(path: Path) -> list[dict[str, Any]]:
    lines = []
    for text in path.read_text().splitlines() if path.exists() else []:
        try:
            lines.append(json.loads(text))
        except ValueError:  # an incomplete last line, left by a killed run
            continue
    return lines


def _dump(values: dict[str, Any]) -> str:
    """Return one JSON line. Floats round-trip exactly. NaN and Inf are not valid JSON, so they become null."""
    try:
        return _encode(values) + "\n"
    except ValueError:  # rare; checking every value up front took a fifth of the time
        finite = {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in values.items()}
        return _encode(finite) + "\n"


class Rate:
    """Convert step time to tokens per second and MFU. A token is anything that has its own target."""

    def __init__(
        self, model: Any, data: Loader, batch_size: int, device: torch.device, dtype: torch.dtype, world_size: int
    ) -> None:
        self.tokens_per_sample = data.sample()[1].numel()
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
