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
# What the names in metrics.jsonl mean: for `dtrain explain`.
MEANINGS = {
    "loss": "mean loss of the global batch of a step, before its update",
    "lr": "learning rate of the step: optim.lr times the schedule",
    "grad_norm": "norm of the gradient over the whole model and mesh, before clipping (train.max_grad_norm)",
    "tokens": "tokens trained on since step 0; samples, where a sample has one target",
    "tokens_per_s": "tokens (or samples) a second of all ranks, of this step",
    "step_s": "seconds of a step, with the wait for its batch",
    "data_s": "seconds that the step waited for its batch",
    "mfu": "model FLOPs utilization: the model's FLOPs a second as a share of the GPU's peak; null on a CPU",
    "mem_gib": "peak memory of a rank: of its GPU, or of its process on a CPU",
    "exposed_comm_s": "seconds of a step in which even the rank that waits least waits for communication",
    "val_loss": "mean loss over train.eval_batches batches of the held-out split, every train.eval_every steps",
    "val_perplexity": "e to the val_loss, for language models",
    "val_accuracy": "share of the held-out targets whose class has the highest score",
    "val_top5": "share of the held-out targets whose class is among the five highest scores",
}
ALSO = {
    "tokens/s": "tokens_per_s", "throughput": "tokens_per_s", "samples_per_s": "tokens_per_s",
    "perplexity": "val_perplexity", "ppl": "val_perplexity", "accuracy": "val_accuracy", "acc": "val_accuracy",
    "val_acc": "val_accuracy", "top5": "val_top5", "eval_loss": "val_loss", "train_loss": "loss",
    "gpu_memory": "mem_gib",
}  # fmt: skip
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
