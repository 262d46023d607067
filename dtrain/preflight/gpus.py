"""GPUs of a node through nvidia-smi: count, driver, memory errors, throttled clocks, memory used by others."""

from __future__ import annotations

import csv
import subprocess
from collections.abc import Callable
from typing import Any

from dtrain.config.hardware import count_gpus
from dtrain.preflight.node_checks import Finding, finding

FIELDS = ("index", "name", "driver_version", "memory.used", "memory.total", "ecc.errors.uncorrected.volatile.total")
# NVML's reasons for a lower clock; idle, a chosen clock and the power cap are not defects
SLOWED = {0x8: "hardware slowdown", 0x20: "too hot", 0x40: "too hot (hardware)", 0x80: "power brake"}
OTHERS_MIB = 1024  # the driver itself holds up to about 600 MiB of a large card
Query = Callable[[str], str | None]


def nvidia_smi(fields: str) -> str | None:
    """Run one query as csv; None if nvidia-smi is missing or does not know a field. With a broken driver it hangs."""
    command = ["nvidia-smi", f"--query-gpu={fields}", "--format=csv,noheader,nounits"]
    try:
        answer = subprocess.run(command, capture_output=True, text=True, timeout=15)
    except FileNotFoundError:
        return None
    except subprocess.TimeoutExpired as error:
        raise OSError("nvidia-smi did not answer within 15 s: the driver hangs") from error
    return answer.stdout if answer.returncode == 0 else None


def look(query: Query = nvidia_smi, visible: str | None = None) -> list[dict[str, str]]:
    """Return our GPUs as field → text; empty if there are none. visible: CUDA_VISIBLE_DEVICES."""
    rows = csv.reader((query(",".join(FIELDS)) or "").splitlines(), skipinitialspace=True)
    found = [dict(zip(FIELDS, row, strict=True)) for row in rows if len(row) == len(FIELDS)]
    for name in ("clocks_event_reasons.active", "clocks_throttle_reasons.active"):  # new and old drivers
        reasons = (query(name) or "").split() if found else []
        if len(reasons) == len(found):
            for gpu, reason in zip(found, reasons, strict=True):
                gpu["slowed"] = reason
            break
    ours = [word.strip() for word in visible.split(",")] if visible is not None else []
    return [gpu for gpu in found if gpu["index"] in ours] if ours and all(map(str.isdigit, ours)) else found


def gpus(needed: int, found: list[dict[str, str]], present: int | None = None) -> list[Finding]:
    """Return findings about the required GPUs; every GPU with a defect is named."""
    if needed == 0:
        return [finding("gpus", "skipped", "this configuration uses none")]
    number = len(found) or (count_gpus() if present is None else present)
    if number < needed:
        kind = f" ({found[0]['name']})" if found else ""
        return [
            finding(
                "gpus", "bad", f"{needed} GPUs are needed on each node, but this one shows {number}{kind}",
                f"nvidia-smi and dmesg on the node; does the job request them? or cluster.gpus_per_node={number}",
            )
        ]  # fmt: skip
    if not found:
        return [
            finding(
                "gpus",
                "ok",
                f"{number} GPUs; there is no nvidia-smi here, so nothing more was checked",
                short=f"{number}",
            )
        ]
    defects = [defect for gpu in found for defect in defects_of(gpu)]
    if defects:
        return [finding("gpus", "bad", text, fix) for text, fix in defects]
    kinds = sorted({gpu["name"] for gpu in found})
    return [
        finding("gpus", "ok", f"{number} × {', '.join(kinds)}", short=f"{number} × {kinds[0].removeprefix('NVIDIA ')}")
    ]


def defects_of(gpu: dict[str, str]) -> list[tuple[str, str]]:
    """(problem, fix) for each defect of one GPU; a field that the card does not have ("[N/A]") is ignored."""
    label, found = f"GPU {gpu['index']} ({gpu['name']})", []
    errors = number_of(gpu["ecc.errors.uncorrected.volatile.total"])
    if errors:
        fix = "nvidia-smi -q -d ECC,ROW_REMAPPER; reset or replace it, and until then leave the node out"
        found.append(
            (f"{label}: {errors:.0f} memory errors that could not be corrected since the driver was loaded", fix)
        )
    reasons = [
        word
        for bit, word in SLOWED.items()
        if number_of(gpu.get("slowed", "")) and int(number_of(gpu["slowed"]) or 0) & bit
    ]
    if reasons:
        found.append(
            (f"{label}: its clock is throttled: {', '.join(reasons)}", "nvidia-smi -q -d PERFORMANCE; cooling, power")
        )
    used = number_of(gpu["memory.used"]) or 0
    if used > OTHERS_MIB:
        fix = "nvidia-smi shows whose processes; end them, or leave the node out"
        found.append((f"{label}: {used / 1024:.1f} GiB are held by other processes", fix))
    return found


def number_of(text: Any) -> float | None:
    """Parse 12 or 0x40; "[N/A]" → None."""
    try:
        return float(int(str(text), 0)) if str(text).startswith("0x") else float(text)
    except (TypeError, ValueError):
        return None
