"""Time a call on a device, and collectives over a group: for preflight and for `dtrain plan calibrate`."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

MIB = 2**20
BUDGET_S = 1.0  # for one collective at one size
Group = Any  # torch's process group type is partly private
# bus bytes per message byte, by the number of ranks (nccl-tests, doc/PERFORMANCE.md)
BUS = {
    "all_reduce": lambda n: 2 * (n - 1) / n,
    "all_gather": lambda n: (n - 1) / n,
    "reduce_scatter": lambda n: (n - 1) / n,
}


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


def collective(name: str, num_bytes: int, group: Group, device: torch.device) -> Callable[[], object]:
    """Return one collective over messages of this size, ready to be called repeatedly."""
    size = dist.get_world_size(group)
    whole = torch.zeros(num_bytes // 4 // size * size, device=device)
    if name == "all_reduce":
        return lambda: dist.all_reduce(whole, group=group)
    part = torch.zeros(whole.numel() // size, device=device)
    if name == "all_gather":
        return lambda: dist.all_gather_into_tensor(whole, part, group=group)
    return lambda: dist.reduce_scatter_tensor(part, whole, group=group)


def bus_bandwidth(
    name: str, sizes_mib: list[int], group: Group, control: Group, device: torch.device
) -> tuple[float, int]:
    """(GB/s on the bus, MiB of the message): the largest size that the time allows; a slow link must not hang it.

    Every rank waits for the slowest through `control`, a CPU group of the same ranks, so all take the same branches.
    """
    seconds, size = float("inf"), sizes_mib[0]
    for i, size in enumerate(sizes_mib):
        step = collective(name, size * MIB, group, device)
        step()
        seconds = slowest(timed(step, device, 1), control)
        steps = int(min(10.0, BUDGET_S / seconds))
        if i + 1 < len(sizes_mib) and seconds * sizes_mib[i + 1] / size < BUDGET_S:
            continue
        if steps > 1:
            seconds = min(seconds, slowest(timed(step, device, steps), control))
        break
    return BUS[name](dist.get_world_size(group)) * size * MIB / seconds / 1e9, size


def slowest(seconds: float, control: Group) -> float:
    value = torch.tensor([seconds], dtype=torch.float64)
    dist.all_reduce(value, dist.ReduceOp.MAX, group=control)
    return float(value.item())
