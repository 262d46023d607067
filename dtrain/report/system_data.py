"""The system metrics of a run's nodes (logs/system-NODE.jsonl) as curves over time, for the page."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from dtrain.config.redaction import hide
from dtrain.report.curves import columns, curve
from dtrain.runs.metrics import gpus_of, rows, system_files
from dtrain.util.format import clean, finite

# key: heading, unit, key of the limit that is drawn beside it
OF_GPU = {
    "utilization_percent": ("GPU utilisation", "%", None),
    "memory_gib": ("GPU memory", "GiB", "memory_total_gib"),
    "power_w": ("GPU power", "W", "power_limit_w"),
    "temperature_c": ("GPU temperature", "°C", None),
    "sm_clock_mhz": ("GPU clock", "MHz", None),
}
OF_NODE = {
    "cpu_percent": ("CPU", "%", None),
    "memory_gib": ("host memory", "GiB", "memory_total_gib"),
    "net_in_mib_s": ("network in", "MiB/s", None),
    "net_out_mib_s": ("network out", "MiB/s", None),
    "disk_read_mib_s": ("disk read", "MiB/s", None),
    "disk_write_mib_s": ("disk write", "MiB/s", None),
    "disk_free_gib": ("free disk", "GiB", None),
}
MOST_LINES = 16  # of one picture; more cannot be told apart
MOST_NODES = 64
MOST_GPUS = 16
MOST_TROUBLES = 100


def system_data(run_dir: Path, since: float | None, most: int) -> dict[str, Any] | None:
    """Return charts of lines over seconds since the start, and what the GPUs reported; None without files."""
    nodes = {node: rows(path) for node, path in list(system_files(run_dir).items())[:MOST_NODES]}
    nodes = {
        hide(clean(node)): [row for row in lines if finite(row.get("time")) is not None]
        for node, lines in nodes.items()
    }
    nodes = {node: lines for node, lines in nodes.items() if lines}
    if not nodes:
        return None
    if since is None:
        since = min(float(lines[0]["time"]) for lines in nodes.values())
    gpus = {
        f"{node} GPU {i}" if len(nodes) > 1 else f"GPU {i}": [(row["time"], of_gpu(row, i)) for row in lines]
        for node, lines in nodes.items()
        for i in gpu_numbers(lines)
    }
    whole = {node: [(row["time"], row) for row in lines] for node, lines in nodes.items()}
    charts = [*charts_of(gpus, OF_GPU, since, most), *charts_of(whole, OF_NODE, since, most)]
    return {"charts": charts, "troubles": troubles(gpus, since)[:MOST_TROUBLES], "nodes": len(nodes), "gpus": len(gpus)}


Samples = dict[str, list[tuple[Any, dict[str, Any]]]]


def gpu_numbers(lines: Sequence[dict[str, Any]]) -> list[int]:
    found = {g.get("index") for row in lines for g in gpus_of(row)}
    return sorted(i for i in found if isinstance(i, int) and not isinstance(i, bool))[:MOST_GPUS]


def of_gpu(row: dict[str, Any], index: int) -> dict[str, Any]:
    return next((g for g in gpus_of(row) if g.get("index") == index), {})


def charts_of(samples: Samples, metrics: dict[str, Any], since: float, most: int) -> list[dict[str, Any]]:
    charts = []
    for key, (title, unit, limit) in metrics.items():
        lines: list[dict[str, Any]] = []
        limits: list[float] = []
        for name, rows_of in samples.items():
            found = columns({"step": t - since, key: row.get(key)} for t, row in rows_of).get(key)
            if found and len(lines) < MOST_LINES:
                lines.append({"name": name, **curve(*found, most, digits=4)})
            limits += [most_of for _, row in rows_of[-1:] if limit and (most_of := finite(row.get(limit))) is not None]
        if lines:
            charts.append({"title": title, "unit": unit, "limit": max(limits, default=None), "lines": lines})
    return charts


def troubles(gpus: Samples, since: float) -> list[dict[str, Any]]:
    """Throttling, XID and ECC errors: one entry for each stretch of time in which they are reported."""
    found: list[dict[str, Any]] = []
    is_trouble: list[tuple[str, Callable[[dict[str, Any]], str]]] = [
        ("throttled", lambda gpu: ", ".join(texts(gpu.get("throttle")))),
        ("XID", lambda gpu: ", ".join(texts(gpu.get("xid")))),
        ("ECC errors", lambda gpu: str(int(count)) if (count := finite(gpu.get("ecc_errors"))) else ""),
    ]
    for name, samples in gpus.items():
        for what, describe in is_trouble:
            before = ""
            for moment, gpu in samples:
                says = hide(clean(describe(gpu)))[:200] if describe(gpu) else ""
                if says and says != before:
                    found.append(
                        {"from": float(moment) - since, "to": float(moment) - since, "text": f"{name}: {what}: {says}"}
                    )
                elif says:
                    found[-1]["to"] = float(moment) - since
                before = says
    return sorted(found, key=lambda one: float(one["from"]))


def texts(value: object) -> list[str]:
    return [str(item) for item in value[:8]] if isinstance(value, list) else []
