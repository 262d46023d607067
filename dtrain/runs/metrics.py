"""The metrics of a run, read back from its files: for pages, tables, notebooks and trackers. Imports no torch."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from dtrain.runs.folder import OWN as OWN
from dtrain.runs.folder import parse_line
from dtrain.util.format import as_dict, finite, number
from dtrain.util.regular_file import read_bytes

# numbers of metrics.jsonl that are not drawn
NO_CURVE = ("step", "tokens", "time", "save_step", "slow_rank", "slowdown", "slow_since", "slow_until")
# Of an evaluation, what dtrain's own models have. All others are the user's own, from a model, a loss or a hook.
USUAL = ("val_loss", "val_perplexity", "val_accuracy", "val_top5")
NAME = re.compile(r"[A-Za-z_][\w./@-]{0,79}", re.ASCII)
SYSTEM_FILE = "logs/system-{}.jsonl"  # one per node: its CPUs, memory, disks, network and GPUs, every few seconds


# words in the name of a metric that tell which values are good
SMALL_IS_GOOD = {"loss", "perplexity", "error", "err", "mse", "rmse", "mae", "nll", "bpb", "wer", "cer"}
LARGE_IS_GOOD = {"accuracy", "acc", "top1", "top5", "f1", "auc", "auroc", "precision", "recall", "bleu", "iou", "mfu"}


def larger_is_better(metric: str) -> bool | None:
    """Whether large values of a metric are good, by its name; None: the name does not tell."""
    words = {word for word in metric.lower().split("_") if word}
    small, large = words & SMALL_IS_GOOD, words & LARGE_IS_GOOD
    if small and not large:
        return False
    return True if (large and not small) or metric.endswith("_per_s") else None


def is_name(name: object) -> bool:
    """Can this be the name of a metric?"""
    return isinstance(name, str) and NAME.fullmatch(name) is not None


def own_metrics(summary: dict[str, Any]) -> dict[str, float]:
    """Return the user's own metrics of a summary, which may be anyone's file."""
    listed = summary.get("own_metrics")
    names = [name for name in listed if is_name(name)] if isinstance(listed, list) else []
    return {name: value for name in names if (value := finite(summary.get(name))) is not None}


def own_names(found: Iterable[str]) -> list[str]:
    """Return the names among an evaluation's metrics that are the user's own."""
    return [name for name in found if name not in USUAL]


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
