"""Which run saved a checkpoint: this one, another, or the one that a fork began with; and so, whose metrics it has."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from dtrain.checkpoint import manifest
from dtrain.errors import CheckpointError
from dtrain.runs.best import METRICS, is_of_other_data
from dtrain.runs.folder import read_json
from dtrain.util.format import as_dict


def run_id(folder: Path) -> str | None:
    """Return the id of the run that a folder of checkpoints belongs to; None for runs of older versions."""
    found = read_json(folder.parent / "launch.json").get("id")
    return found if isinstance(found, str) else None


def differs(saved: Any, run: str | None) -> bool:
    return saved is not None and run is not None and saved != run


def is_foreign(path: Path, run: str | None) -> bool:
    """Return whether another run saved a checkpoint. An unreadable one counts as ours and is renamed as damaged."""
    try:
        return run is not None and differs(manifest.read(path).meta.get("run"), run) and not is_forked(path)
    except (CheckpointError, OSError):
        return False


def forked_from(folder: Path) -> dict[str, Any]:
    """Return what launch.json says about the checkpoint that a fork began with (launch/fork.py); {}: no fork."""
    return as_dict(read_json(folder.parent / "launch.json").get("forked_from"))


def is_forked(path: Path) -> bool:
    """Is it the checkpoint that a fork began with, and so saved by the run that it was forked from?"""
    origin, saved = forked_from(path.parent), manifest.read(path)
    return saved["step"] == origin.get("step") and not differs(saved.meta.get("run"), origin.get("id"))


def metrics_of(path: Path) -> dict[str, Any]:
    """Return the metrics of the evaluation at a checkpoint's step; {} if there was none, or if it is damaged.

    {} also if a fork with other data began there: those of the parent were measured on its own data.
    """
    try:
        saved = manifest.read(path)
        elsewhere = is_of_other_data(forked_from(path.parent), saved["step"], saved.meta.get("run"))
        return {} if elsewhere else as_dict(saved.meta.get(METRICS))
    except (CheckpointError, OSError):
        return {}
