"""Which lines of code hold the memory at its peak, from torch's history of GPU allocations."""

from __future__ import annotations

import re
from collections import defaultdict
from typing import Any

from dtrain.errors import bad

TOP = 20
UNKNOWN = "the backward pass, or before the history began"  # autograd's threads have no Python frames
# Uninformative frames: torch itself, code that it generates, and Python's own helpers.
NOT_OURS = re.compile(r"/torch/|torchinductor|^<|^\?\?$|/(contextlib|functools|threading)\.py$|dtrain/profile/")


def no_gpu() -> ValueError:
    rule = "torch keeps a history of GPU memory only, and there is no GPU"
    return bad("profile", "memory", rule, "profile=torch shows where the time goes; dtrain plan what memory is needed")


def table(snapshot: dict[str, Any], device: int) -> dict[str, Any]:
    """Return the peak in the history, and the largest allocations at that moment, by the line that made them.

    The history may lack its beginning, but the state at its end is known. So it is walked backwards from there.
    """
    segments = [s for s in snapshot["segments"] if s.get("device", device) == device]
    held: dict[int, tuple[int, str]] = {}
    for segment in segments:
        address = segment["address"]
        for block in segment["blocks"]:
            address = block.get("address", address)
            if block["state"].startswith("active"):
                held[address] = (int(block["size"]), where(block.get("frames", [])))
            address += block["size"]
    now = peak = sum(size for size, _ in held.values())
    traces = snapshot.get("device_traces", [])
    history = traces[device] if device < len(traces) else []
    # The line that allocated what was freed later: known if the history also has the allocation.
    asked: dict[int, str] = {}
    origin: dict[int, str] = {}  # index of a free → the allocating line
    for i, event in enumerate(history):
        if event["action"] == "alloc":
            asked[event["addr"]] = where(event.get("frames", []))
        elif event["action"] == "free_completed":
            origin[i] = asked.pop(event["addr"], UNKNOWN)
    peak_at = len(history)
    for i in reversed(range(len(history))):  # before event i
        event = history[i]
        if event["action"] == "alloc":
            now -= event["size"]
        elif event["action"] == "free_completed":
            now += event["size"]
            if now > peak:
                peak, peak_at = now, i
    for i in reversed(range(peak_at, len(history))):
        event = history[i]
        if event["action"] == "alloc":
            held.pop(event["addr"], None)
        elif event["action"] == "free_completed":
            held[event["addr"]] = (event["size"], origin[i])
    sizes: dict[str, list[int]] = defaultdict(list)
    for size, line in held.values():
        sizes[line].append(size)
    most = sorted(sizes.items(), key=lambda pair: -sum(pair[1]))[:TOP]
    return {
        "peak_bytes": peak,
        "reserved_bytes": sum(s["total_size"] for s in segments),
        "allocations": [
            {"where": line, "bytes": sum(found), "percent": 100 * sum(found) / max(peak, 1), "count": len(found)}
            for line, found in most
        ],
    }


def where(frames: list[dict[str, Any]]) -> str:
    """Return "file:line function" of the innermost frame that is not torch's own."""
    for frame in frames:
        if not NOT_OURS.search(frame["filename"]):
            path = frame["filename"].split("/site-packages/")[-1]
            return f"{'/'.join(path.split('/')[-3:])}:{frame['line']} {frame['name']}"
    return UNKNOWN
