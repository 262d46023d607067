"""The rules of context parallel, which divides sequences over ranks: checked before the launch, without torch."""

from __future__ import annotations

import math
from typing import Any

from dtrain.checks.strategy import shared_gpus
from dtrain.config.mesh import MeshSizes
from dtrain.config.models import LANGUAGE_MODELS
from dtrain.errors import bad

WHY_NOT = {
    "dtrain.models.bert.Bert": "is bidirectional, and only causal attention over parts of a sequence is implemented",
    "dtrain.models.vit.ViT": "has no long sequence, but some patches and a class token",
    "dtrain.models.resnet.ResNet": "has no sequence",
    "dtrain.models.convnet.ConvNet": "has no sequence",
}
OTHER = "strategy.cp=1"


def check(config: dict[str, Any], sizes: MeshSizes) -> None:
    strategy, model, data, cp = config["strategy"], config["model"], config["data"], sizes.cp
    if cp == 1:
        return
    target, kind = model["_target_"], strategy["cp_kind"]
    if target not in LANGUAGE_MODELS:
        rule = WHY_NOT.get(target, "does not divide its sequences: only dtrain's gpt2 and llama do")
        raise bad("strategy.cp", cp, f"model={config['choices'].get('model')} {rule}", OTHER)
    if model["dropout"]:
        rule = f"dropout of attention over parts of a sequence is not implemented, and strategy.cp={cp}"
        raise bad("model.dropout", model["dropout"], rule, f"model.dropout=0, or {OTHER}")
    if not config["loss"]["_target_"].startswith("dtrain."):
        rule = f"each of strategy.cp={cp} ranks has some tokens of a sequence, and only of dtrain's losses it is known"
        loss = config["choices"].get("loss") or config["loss"]["_target_"]
        raise bad("loss", loss, f"{rule} that they are means over tokens", f"loss=own, loss=cross_entropy, or {OTHER}")
    unit = cp if kind == "ulysses" else 2 * cp
    seq_len, where = (data["seq_len"], "data") if data.get("seq_len") else (model["seq_len"], "model")
    if seq_len % unit:
        parts = "one part for each rank" if kind == "ulysses" else "two parts for each rank"
        rule = f"strategy.cp_kind={kind} needs {parts}, so {where}.seq_len={seq_len} must be a multiple of {unit}"
        down = seq_len // unit * unit
        raise bad("strategy.cp", cp, rule, f"{where}.seq_len={down or unit}, or a smaller strategy.cp")
    for setting in ("num_heads", "num_kv_heads") if kind == "ulysses" else ():
        count = model.get(setting)
        if count and count % (sizes.tp * cp):
            held = f"strategy.tp={sizes.tp} × strategy.cp={cp}" if sizes.tp > 1 else f"strategy.cp={cp}"
            rule = f"gives each rank some heads, so {held} must divide model.{setting}={count}"
            fits = math.gcd(model["num_heads"], model.get("num_kv_heads") or 0, sizes.tp * cp) // sizes.tp
            less = f", or strategy.cp={fits}" if fits > 1 else ""
            raise bad("strategy.cp_kind", kind, rule, f"strategy.cp_kind=ring{less}")
    if kind != "allgather" and shared_gpus(config["cluster"]):
        rule = "ranks that share a GPU communicate over gloo, which cannot send GPU tensors between two ranks"
        raise bad("strategy.cp_kind", kind, rule, "strategy.cp_kind=allgather")
    if config["activation_checkpointing"] == "ops" and attends_by_blocks(cp, kind):
        rule = f"would keep the attention to each of the {cp} ranks' keys under strategy.cp_kind={kind}"
        raise bad("activation_checkpointing", "ops", rule, "activation_checkpointing=full, or selective")
    if config["compile"] == "whole":
        rule = f"strategy.cp={cp} communicates inside attention, which a graph cannot contain"
        raise bad("compile", "whole", rule, "compile=blocks")
    if strategy.get("schedule") == "zbv" and not zbv_splits_functions():
        rule = f"splits the backward pass in two, and torch before 2.13 cannot split the attention of strategy.cp={cp}"
        raise bad("strategy.schedule", "zbv", rule, f"strategy.schedule=interleaved_1f1b, a newer torch, or {OTHER}")


def attends_by_blocks(cp: int, kind: str) -> bool:
    """Is attention computed for one rank's keys after the other's, with a result of each?"""
    return cp > 1 and kind != "ulysses"


def zbv_splits_functions() -> bool:
    """Can the torch here split the backward pass of an autograd function? True if there is none, as on a login node."""
    from importlib import metadata  # slow to import

    try:
        return tuple(int(part) for part in metadata.version("torch").split(".")[:2]) >= (2, 13)
    except metadata.PackageNotFoundError:
        return True
