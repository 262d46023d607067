"""The rules of the section `checkpoint`: which of its settings contradict each other or the rest."""

from __future__ import annotations

import difflib
from typing import Any

from dtrain.config.models import LANGUAGE_MODELS
from dtrain.errors import bad
from dtrain.runs.best import mode_of
from dtrain.util.format import as_dict

CLASSIFIERS = (
    "dtrain.models.bert.Bert", "dtrain.models.convnet.ConvNet", "dtrain.models.resnet.ResNet", "dtrain.models.vit.ViT",
)  # fmt: skip


def check(config: dict[str, Any]) -> None:
    saves = config["checkpoint"]
    if saves["peer_every"] and not saves["peer"]:
        fix = "checkpoint.peer=true, or checkpoint.peer_every=0"
        raise bad("checkpoint.peer_every", saves["peer_every"], "copies in memory are off (checkpoint.peer=false)", fix)
    if saves["keep_best"] is not None:
        check_best(config, saves["keep_best"], saves["best_mode"])
    elif saves["best_mode"] is not None:
        rule = "says which values of a metric are good, and no metric is given"
        raise bad("checkpoint.best_mode", saves["best_mode"], rule, "checkpoint.keep_best=val_loss")
    if not saves["save"]:
        check_none(config)


def check_best(config: dict[str, Any], metric: str, mode: str | None) -> None:
    if not config["train"]["eval_batches"] and (metric.startswith("val_") or not config.get("hooks")):
        rule = "is a metric of evaluations, and train.eval_batches=0 means that there are none"
        raise bad("checkpoint.keep_best", metric, rule, "train.eval_batches=8, or checkpoint.keep_best=null")
    if metric in ("loss", "train_loss"):
        rule = "is a metric of training steps; evaluations have val_loss"
        raise bad("checkpoint.keep_best", metric, rule, "checkpoint.keep_best=val_loss")
    check_known("checkpoint.keep_best", metric, config)
    if mode_of(metric, mode) is None:
        rule = "its name does not tell whether small or large values are good"
        raise bad(
            "checkpoint.keep_best", metric, rule, f"checkpoint.keep_best={metric} checkpoint.best_mode=max (or min)"
        )


def check_known(key: str, metric: str, config: dict[str, Any]) -> None:
    """Refuse a metric that no evaluation will have, as far as that is known before the start."""
    known = known_metrics(config)
    if known and metric not in known:
        near = difflib.get_close_matches(metric, known, 1, 0.75)
        rule = f"evaluations of this run have no such metric; they have {', '.join(known)}"
        raise bad(key, metric, rule, f"{key}={near[0] if near else known[0]}")


def known_metrics(config: dict[str, Any]) -> list[str]:
    """Return the names of the metrics of evaluations; [] if the user's own code may add some."""
    model = config["model"]
    target, own_hooks = model["_target_"], as_dict(config.get("hooks")).keys() - {"early_stop"}
    if own_hooks or config["choices"].get("loss") != "own" or not target.startswith("dtrain.models."):
        return []
    if target in LANGUAGE_MODELS:
        return ["val_loss", "val_perplexity"]
    if target not in CLASSIFIERS:
        return []
    is_mlm = model.get("task") == "mlm"
    few = not is_mlm and model.get("num_classes", 10) <= 5  # then top 5 is not measured
    return ["val_loss", "val_accuracy"] + ["val_top5"] * (not few) + ["val_perplexity"] * is_mlm


def check_none(config: dict[str, Any]) -> None:
    """Reject what needs a checkpoint, if the run saves none."""
    saves = config["checkpoint"]
    for setting, value, off, why in (
        ("checkpoint.peer", saves["peer"], "false", "copies in memory are checkpoints, too"),
        ("checkpoint.keep_best", saves["keep_best"], "null", "there is no checkpoint to keep"),
        ("train.spike", config["train"]["spike"] == "rollback" and "rollback", "skip", "goes back to a checkpoint"),
    ):
        if value:
            text = str(value).lower() if isinstance(value, bool) else value
            rule = f"{why}, and checkpoint.save=false (checkpoint=none) saves none"
            raise bad(setting, text, rule, f"{setting}={off}, or checkpoint.save=true")
