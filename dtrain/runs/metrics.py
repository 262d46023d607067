"""The metrics of a run, read back from its files: for pages, tables, notebooks and trackers. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from dtrain.runs.folder import parse_line
from dtrain.util.format import as_dict, number
from dtrain.util.regular_file import read_bytes

# numbers of metrics.jsonl that are not drawn
NO_CURVE = ("step", "tokens", "time", "save_step", "slow_rank", "slowdown", "slow_since", "slow_until")
SYSTEM_FILE = "logs/system-{}.jsonl"  # one per node: its CPUs, memory, disks, network and GPUs, every few seconds


def rows(path: Path) -> list[dict[str, Any]]:
    """Read a file of JSON lines, such as metrics.jsonl. A line that was not written whole is left out."""
    try:
        lines = read_bytes(path).splitlines()
    except OSError:  # nothing written yet
        return []
    return [row for row in map(parse_line, lines) if row]


def series(rows: Iterable[dict[str, Any]], name: str) -> tuple[list[int], list[float]]:
    """Return the steps and the values of one metric, without those that are missing or not finite (null)."""
    found = [(row["step"], number(row.get(name))) for row in rows if isinstance(row.get("step"), int)]
    kept = [(step, value) for step, value in found if value is not None]
    return [step for step, _ in kept], [value for _, value in kept]


def gpus_of(sample: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the GPUs of a line of system metrics."""
    found = sample.get("gpus")
    return [as_dict(gpu) for gpu in found] if isinstance(found, list) else []


def system_files(run_dir: Path) -> dict[str, Path]:
    """Return the file of system metrics of each node, by the node's name."""
    before, after = SYSTEM_FILE.split("/")[1].split("{}")
    found = sorted((run_dir / "logs").glob(f"{before}*{after}"))
    return {path.name[len(before) : -len(after)]: path for path in found}
