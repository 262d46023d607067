"""Which checkpoint of a run is the best one, by the metric of `checkpoint.keep_best`.

The manifest of each checkpoint has the metrics of the evaluation at its step. So the best one is found from the
checkpoints that are there: no further file can disagree with them after a crash, a copy or a fork.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from dtrain.errors import bad
from dtrain.runs.folder import read_json
from dtrain.runs.metrics import larger_is_better
from dtrain.util.format import as_dict, finite

METRICS = "metrics"  # the key in a manifest


def rank_of(value: object, mode: str) -> float | None:
    """Return a number that is smaller for a better value; None: not a finite number, and so never the best."""
    found = finite(value)
    return None if found is None else -found if mode == "max" else found


def mode_of(metric: str, given: str | None) -> str | None:
    """Return min or max; None: the name does not tell which, and nothing is given."""
    if given is not None:
        return given
    larger = larger_is_better(metric)
    return None if larger is None else "max" if larger else "min"


def best_of(metrics: Mapping[int, Mapping[str, Any]], metric: str, mode: str) -> int | None:
    """Return the step with the best value, of `metrics` by step; the earlier one of two equals."""
    found = {step: rank_of(values.get(metric), mode) for step, values in metrics.items()}
    ranked = sorted((value, step) for step, value in found.items() if value is not None)
    return ranked[0][1] if ranked else None


def saved_metrics(folders: Iterable[Path]) -> dict[int, dict[str, Any]]:
    """Return the metrics of each checkpoint by its step, without verifying anything."""
    found = {}
    for path in folders:
        manifest, origin = read_json(path / "manifest.json"), as_dict(read_json(launch_of(path)).get("forked_from"))
        is_usable = not is_of_other_data(origin, manifest.get("step"), manifest.get("run"))
        found[int(path.name[5:])] = as_dict(manifest.get(METRICS)) if is_usable else {}
    return found


def launch_of(checkpoint: Path) -> Path:
    return checkpoint.parent.parent / "launch.json"


def is_of_other_data(origin: Mapping[str, Any], step: object, run: object) -> bool:
    """Is it the checkpoint that a fork with other data began with, whose metrics the parent measured on its own data?

    origin: `forked_from` in launch.json. step, run: of the checkpoint's manifest; old versions had no run there.
    """
    is_first = step == origin.get("step") and (None in (run, origin.get("id")) or run == origin.get("id"))
    return is_first and "data" in (origin.get("anew") or ())


# ---- what follows a metric of the validation split -----------------------------------------------------------------

EARLY_STOP = "dtrain.train.early_stop.EarlyStop"
OF_THE_SPLIT = ("val_loss", "val_perplexity", "val_accuracy", "val_top5")


def check_split(config: Mapping[str, Any], data: str) -> None:
    """Reject early stopping and keep_best where the data have no validation split: no evaluation has such a metric.

    A user's hook may have any of them but val_loss, from an evaluation of its own.
    """
    hooks = config.get("hooks") or {}
    has_own = any(section["_target_"] != EARLY_STOP for section in hooks.values())
    followed = {
        f"hooks.{name}.metric": (
            section.get("metric", "val_loss"),
            f"leave out hooks={name}" if len(hooks) > 1 else "hooks=none",
        )
        for name, section in hooks.items()
        if section["_target_"] == EARLY_STOP
    }
    followed["checkpoint.keep_best"] = (config["checkpoint"].get("keep_best"), "checkpoint.keep_best=null")
    for key, (metric, otherwise) in followed.items():
        if metric in (OF_THE_SPLIT[:1] if has_own else OF_THE_SPLIT) and config["train"]["eval_batches"]:
            rule = f"needs a validation split, and data={data} has none"
            raise bad(key, metric, rule, f'return {{"train": …, "val": …}} from it (docs/your-own.md), or {otherwise}')
