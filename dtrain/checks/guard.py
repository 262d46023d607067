"""The rules of `guard` and `train.spike`: which strategies and devices can repeat a step, or withhold its update."""

from __future__ import annotations

from typing import Any

from dtrain.config.hardware import gpus_per_node
from dtrain.config.mesh import MeshSizes
from dtrain.config.source import has_method
from dtrain.errors import bad
from dtrain.strategies import deepspeed_config


def check(config: dict[str, Any], sizes: MeshSizes) -> None:
    strategy, name = config["strategy"], config["choices"]["strategy"]
    target, replay, spike = strategy["_target_"], config["guard"]["replay_every"], config["train"]["spike"]
    has_engine = False
    if target == "dtrain.strategies.deepspeed.Zero":
        user_config = deepspeed_config.read(path) if (path := strategy.get("deepspeed_config")) else {}
        has_engine = deepspeed_config.needs_engine(strategy, user_config, sizes.world_size)
    if replay and gpus_per_node(config["cluster"]) and not config["deterministic"]:
        rule = "two passes on a GPU have the same bits only with deterministic=true"
        raise bad("guard.replay_every", replay, rule, "deterministic=true, or guard.replay_every=0")
    if replay and has_engine:
        rule = f"strategy={name} cannot repeat a step: DeepSpeed's engine adds gradients to buffers of its own"
        raise bad("guard.replay_every", replay, rule, "strategy=fsdp, or guard.replay_every=0")
    if replay and not target.startswith("dtrain."):
        rule = f"strategy={name} is your own, and dtrain does not know whether its step can be repeated"
        raise bad("guard.replay_every", replay, rule, "guard.replay_every=0")
    if spike == "skip" and has_engine:
        rule = f"strategy={name} cannot skip: DeepSpeed's engine updates in the same call that computes the norm"
        raise bad("train.spike", spike, rule, "train.spike=rollback or stop, or strategy=fsdp")
    decides = not target.startswith("dtrain.") and (has_method(target, "update") or has_method(target, "train_step"))
    if spike and decides:
        rule = f"strategy={name} has an update() or train_step() of its own, which does not look for spikes"
        raise bad("train.spike", spike, rule, "train.spike=null")
    if spike == "rollback" and not config["checkpoint"]["every"]:
        rule = "goes back to a checkpoint, and checkpoint.every=0 saves none before the end"
        raise bad("train.spike", spike, rule, "checkpoint.every=100, or train.spike=skip")
