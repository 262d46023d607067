"""What a run leaves for people and scripts to read: metrics.jsonl, summary.json, and the figures in them."""

from __future__ import annotations

import json
import math
import os
import resource
import sys
from pathlib import Path
from typing import Any

import torch

# Dense 16-bit matrix rate by NVIDIA's data sheets, FLOP/s. MFU is measured against it.
PEAK_FLOPS = {
    "B200": 2250e12, "H200": 989e12, "H100": 989e12, "A100": 312e12, "V100": 125e12, "L40S": 362e12, "L4": 121e12,
    "4090": 165e12, "T4": 65e12,
}  # fmt: skip


class Metrics:
    """Appends to metrics.jsonl. On a resume, lines of steps that will be done again are dropped first."""

    def __init__(self, run_dir: Path, start_step: int) -> None:
        path = run_dir / "metrics.jsonl"
        kept = [line for line in _lines(path) if line["step"] <= start_step]
        temporary = run_dir / ".metrics.jsonl.tmp"
        temporary.write_text("".join(_dump(line) for line in kept))
        os.replace(temporary, path)
        self.file = open(path, "a", buffering=1)  # noqa: SIM115, closed with the process; a line reaches the file at once

    def write(self, **values: Any) -> None:
        self.file.write(_dump(values))


def _lines(path: Path) -> list[dict[str, Any]]:
    lines = []
    for text in path.read_text().splitlines() if path.exists() else []:
        try:
            lines.append(json.loads(text))
        except ValueError:  # the half line of a run that was killed
            continue
    return lines


def _dump(values: dict[str, Any]) -> str:
    """One JSON line. Python writes floats so that they read back exactly; NaN and Inf are not JSON, so null."""
    finite = {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in values.items()}
    return json.dumps(finite) + "\n"


def peak_flops(device: torch.device, dtype: torch.dtype) -> float | None:
    """The device's peak for this type, or None where it is not known (every CPU): MFU is null then."""
    if device.type != "cuda":
        return None
    name = torch.cuda.get_device_name(device)
    for word, peak in PEAK_FLOPS.items():
        if word in name:
            return peak if dtype != torch.float32 else peak / 2  # TF32 has half the rate
    return None


def memory_gib(device: torch.device) -> float:
    """The most memory this rank has held: of the GPU's allocator, or of the process on a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**30
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 2**30
