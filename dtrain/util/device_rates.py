"""Time a call on a device: for preflight, `dtrain plan calibrate` and the collectives of comm/measure.py."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch

MIB = 2**20


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def timed(step: Callable[[], object], device: torch.device, steps: int) -> float:
    """Seconds per step by the host's clock, over this many steps."""
    synchronize(device)
    began = time.perf_counter()
    for _ in range(steps):
        step()
    synchronize(device)
    return (time.perf_counter() - began) / steps


def timed_on_device(step: Callable[[], object], device: torch.device, steps: int) -> float:
    """Seconds per step between two events on the GPU; on a CPU, by the host's clock."""
    if device.type != "cuda":
        return timed(step, device, steps)
    first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    first.record()
    for _ in range(steps):
        step()
    last.record()
    torch.cuda.synchronize(device)
    return float(first.elapsed_time(last)) / 1e3 / steps


def best_time(step: Callable[[], object], device: torch.device, repeats: int, steps: int) -> float:
    """Seconds per step, the best of several repeats: other load on the host only slows it down."""
    step()
    return min(timed(step, device, steps) for _ in range(repeats))


def seconds_per_call(step: Callable[[], object], device: torch.device, budget_s: float) -> float:
    """Seconds per call on the device: the median of up to 5 rounds that take the budget together."""
    timed_on_device(step, device, 2)
    once = max(timed_on_device(step, device, 1), 1e-7)
    calls = max(1, int(budget_s / 5 / once))
    rounds = min(5, max(1, int(budget_s / once / calls)))
    return statistics.median(timed_on_device(step, device, calls) for _ in range(rounds))


def matmul_tflops(device: torch.device) -> float:
    """Measure a square matmul: bf16 on a GPU, fp32 on a CPU."""
    cuda = device.type == "cuda"
    size = 8192 if cuda else 768
    a = torch.randn(size, size, device=device, dtype=torch.bfloat16 if cuda else torch.float32)
    out = torch.empty_like(a)
    seconds = best_time(lambda: torch.mm(a, a, out=out), device, 3, 30 if cuda else 3)
    return 2 * size**3 / seconds / 1e12


def memory_gb_s(device: torch.device) -> float:
    """Measure a copy: every byte is read once and written once."""
    source = torch.zeros((1024 if device.type == "cuda" else 64) * MIB, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    seconds = best_time(lambda: target.copy_(source), device, 3, 10 if device.type == "cuda" else 2)
    return 2 * source.numel() / seconds / 1e9
