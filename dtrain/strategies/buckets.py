"""strategy.bucket_mb=auto: time passes with several bucket sizes on this model and these links, and choose the fastest.

Small buckets start early, so more of them is hidden behind the backward pass; large ones are fewer, and each has its
latency. Which wins depends on the model, the batch and the network.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from typing import Any

MIB = 2**20
DEFAULT_MB = 25
SIZES_MB = (25, 5, 1, 100)  # a factor of 2 between two sizes changes little
FEWEST = 3  # sizes that are tried, however long a pass takes
BUDGET_S, ROUNDS = 30.0, 4
VISIT_S, MOST_PASSES = 4.0, 4  # one visit times a pass at least once, and again up to this long or often
CLOSE = 1.2  # a size that is slower than the best by more than this is not visited again


def sizes_to_try(num_bytes: int) -> list[int]:
    """Return the sizes that differ for this many bytes of gradients: all from the first that holds them are alike."""
    whole = min((mb for mb in SIZES_MB if mb * MIB >= num_bytes), default=max(SIZES_MB))
    return [mb for mb in SIZES_MB if mb <= whole]


def measure(sizes: list[int], visit: Callable[[int], list[float]]) -> dict[int, list[float]]:
    """Return the seconds of passes with each size: all sizes in turn, then again those that may be the best.

    `visit` returns the same times on all ranks, so that all ranks try the same sizes.
    """
    times: dict[int, list[float]] = {}
    left, spent = sizes, 0.0
    for _ in range(ROUNDS):
        for mb in left:
            if spent >= BUDGET_S and len(times) >= min(FEWEST, len(sizes)):
                return times
            found = visit(mb)
            times.setdefault(mb, []).extend(found)
            spent += sum(found) + found[0]  # a visit begins with a pass that is not timed
        best = min(map(typical, times.values()))
        close = [mb for mb in left if typical(times[mb]) <= CLOSE * best]
        left = sorted(close, key=lambda mb: typical(times[mb]))  # the best first: the time may be up
        if len(left) == 1:
            break
    return times


def typical(times: list[float]) -> float:
    """Return the mean of the faster half: other load on the machines only adds to a pass."""
    return statistics.fmean(sorted(times)[: (len(times) + 1) // 2])


def best_of(times: dict[int, list[float]]) -> tuple[int, dict[str, float]]:
    """Return the size with the shortest typical pass, and that of each size in ms."""
    found = {mb: typical(times[mb]) for mb in sorted(times)}
    return min(found, key=lambda mb: found[mb]), {str(mb): round(1000 * s, 3) for mb, s in found.items()}


def reason(choice: dict[str, Any]) -> str:
    """Describe a choice in one line of the log."""
    mb, passes = choice["bucket_mb"], choice["pass_ms"]
    tried = ", ".join(f"{size} MiB {ms:.4g} ms" for size, ms in passes.items())
    why = "the fastest forward and backward pass"
    if mb < min(DEFAULT_MB, max(map(int, passes))):
        why += ": smaller buckets start earlier"
    elif mb > DEFAULT_MB:
        why += ": larger buckets are fewer"
    return f"strategy.bucket_mb=auto: buckets of {mb} MiB have {why} ({tried})"
