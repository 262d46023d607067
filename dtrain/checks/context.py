"""The rules of context parallel, which divides sequences over ranks: checked before the launch, without torch."""

from __future__ import annotations

import math
from typing import Any

from dtrain.config.hardware import gpus_per_node
from dtrain.config.mesh import MeshSizes
from dtrain.errors import bad

MODELS = {"dtrain.models.gpt2.GPT2", "dtrain.models.llama.Llama"}
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
    if target not in MODELS:
        rule = WHY_NOT.get(target, "does not divide its sequences: only dtrain's gpt2 and llama do")
        raise bad("strategy.cp", cp, f"model={config['choices'].get('model')} {rule}", OTHER)
    if model["dropout"]:
        rule = f"dropout of attention over parts of a sequence is not implemented, and strategy.cp={cp}"
        raise bad("model.dropout", model["dropout"], rule, f"model.dropout=0, or {OTHER}")
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
    if kind != "allgather" and 0 < gpus_per_node(config["cluster"]) < int(config["cluster"]["processes"]):
        rule = "ranks that share a GPU communicate over gloo, which cannot send GPU tensors between two ranks"
        raise bad("strategy.cp_kind", kind, rule, "strategy.cp_kind=allgather")
    if config["activation_checkpointing"] == "ops" and kind != "ulysses":
        rule = f"would keep the attention to each of the {cp} ranks' keys under strategy.cp_kind={kind}"
        raise bad("activation_checkpointing", "ops", rule, "activation_checkpointing=full, or selective")
    if config["compile"] == "whole":
        rule = f"strategy.cp={cp} communicates inside attention, which a graph cannot contain"
        raise bad("compile", "whole", rule, "compile=blocks")
