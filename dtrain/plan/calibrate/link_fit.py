"""Fit latency and bandwidth: a line through the collective times that `dtrain plan calibrate` measured.

The inverse of dtrain/plan/time/collectives.py, which predicts times from these settings.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from dtrain.plan.time.collectives import STEPS


def bus_bytes(collective: str, ranks: int, num_bytes: float) -> float:
    """Bytes that each link of the ring carries for a message of this size (nccl-tests, doc/PERFORMANCE.md)."""
    return STEPS[collective] * (ranks - 1) / ranks * num_bytes


def line(points: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """(seconds at 0 bytes, seconds per byte) fitted to (bytes, seconds): least squares of the relative error.

    Neither may be negative: the line then goes through the origin or is flat at the mean.
    """
    weights = [1 / seconds**2 for _, seconds in points]
    total = sum(weights)
    mean_x = sum(w * x for w, (x, _) in zip(weights, points, strict=True)) / total
    mean_y = sum(w * y for w, (_, y) in zip(weights, points, strict=True)) / total
    spread = sum(w * (x - mean_x) ** 2 for w, (x, _) in zip(weights, points, strict=True))
    if spread == 0:
        return mean_y, 0.0
    slope = sum(w * (x - mean_x) * (y - mean_y) for w, (x, y) in zip(weights, points, strict=True)) / spread
    slope = max(0.0, slope)
    start = mean_y - slope * mean_x
    if start < 0:
        numerator = sum(w * x * y for w, (x, y) in zip(weights, points, strict=True))
        return 0.0, numerator / sum(w * x * x for w, (x, _) in zip(weights, points, strict=True))
    return start, slope


def link_values(rows: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Return Hardware settings from measured rows of {collective, ranks, bytes, us}; {} without rows."""
    most = max((row["ranks"] for row in rows), default=0)
    values: dict[str, float] = {}
    for name, link in (("all_reduce", "nvlink"), ("all_gather", "gather")):
        times = {r["bytes"]: r["us"] / 1e6 for r in rows if r["collective"] == name and r["ranks"] == most}
        if len(times) < 2:
            continue
        start, slope = line([(bus_bytes(name, most, size), seconds) for size, seconds in times.items()])
        if slope > 0:
            values[f"{link}_max_gb_s"] = 1 / slope / 1e9
        if (seconds := times.get(256 * 2**20)) is not None:  # the size that preflight compares at
            values[f"{link}_busbw_gb_s"] = bus_bytes(name, most, 256 * 2**20) / seconds / 1e9
        if name == "all_reduce":
            two = [(r["bytes"], r["us"] / 1e6) for r in rows if r["collective"] == name and r["ranks"] == 2]
            values |= latency(start * 1e6, most, line(two)[0] * 1e6 if most > 2 and len(two) > 1 else None)
    return values


def latency(start_us: float, ranks: int, of_two_us: float | None = None) -> dict[str, float]:
    """Split a collective's time at 0 bytes into a fixed part and a part per hop: never 0, which would mean unknown.

    Two ranks and all ranks give two equations. Without the first, each part gets half.
    """
    steps = STEPS["all_reduce"] * (ranks - 1)
    each = start_us / 2 / steps if of_two_us is None else (start_us - of_two_us) / (steps - 2)
    each = max(0.1, each)
    return {"collective_us": max(0.1, start_us - each * steps), "nvlink_latency_us": each}
