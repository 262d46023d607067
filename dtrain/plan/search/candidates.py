"""Frames: every strategy with every degree and variant that the cluster and the typed settings allow.

A frame is a layout without its micro-batch size and checkpointing. It is the section of conf/strategy as the launcher
would compose it, so that the launcher's own rules apply.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from dtrain.checks import strategy
from dtrain.config.hardware import world_size
from dtrain.config.mesh import MeshSizes
from dtrain.config.source import has_method
from dtrain.plan.layout import SERVED
from dtrain.plan.sections import CHOSEN, strategy_section

# Simplest first: preferred if two are equally fast. Planned only on request: local_sgd and diloco, whose math differs,
# ring, which is slower than ddp, horovod, which is predicted like ddp, and ps, which is faster only if a rank is slow.
STRATEGIES = ("ddp", "fsdp", "zero1", "zero2", "zero3", "fairscale", "tensor", "pipeline", "3d")
PARALLEL = ("sequence_parallel", "loss_parallel")
STAGES = (2, 4)  # stages per rank of an interleaved pipeline; more would send many small messages
# the neutral value of a setting that a strategy does not have
NEUTRAL: dict[str, Any] = {
    "tp": 1, "pp": 1, "cp": 1, "sequence_parallel": False, "loss_parallel": False, "offload": "none",
    "offload_params": "none",
    "replica_size": None, "sharding": "", "schedule": "", "stages_per_rank": "", "mode": "", "data": "",
}  # fmt: skip


@dataclass(frozen=True)
class Frame:
    """One strategy with its degrees and variants: the section as the launcher would compose it."""

    name: str
    section: dict[str, Any]
    sizes: MeshSizes


def frames(config: Mapping[str, Any], typed: Collection[str]) -> Iterator[Frame]:
    """Yield every strategy with every degree and variant that the typed settings allow; offload last."""
    chosen = config["choices"]["strategy"]
    names = (chosen,) if "strategy" in typed else STRATEGIES
    fixed = {key: config["strategy"].get(key) for key in CHOSEN if f"strategy.{key}" in typed}
    target = config["model"]["_target_"]
    can = {"tp": has_method(target, "tp_plan") is not False, "pp": has_method(target, "pipeline_split") is not False}
    for name in names:
        section = dict(config["strategy"]) if name == chosen else strategy_section(name)
        if any(value != NEUTRAL.get(key, value) for key, value in fixed.items() if key not in section):
            continue  # the typed settings do not apply to this strategy
        section |= {key: value for key, value in fixed.items() if key in section}
        variants = list(itertools.product(*choices_of(section, fixed, config).values()))
        keys = list(choices_of(section, fixed, config))
        for sizes in meshes(section, fixed, config, can):
            seen = set()
            for values in variants:
                candidate = normal({**section, **dict(zip(keys, values, strict=True))}, sizes, fixed)
                mark = tuple(candidate[key] for key in keys)
                if mark in seen or not sensible(candidate, sizes, config, fixed):
                    continue
                seen.add(mark)
                yield Frame(name, candidate, sizes)


def meshes(
    section: Mapping[str, Any], fixed: Mapping[str, Any], config: Mapping[str, Any], can: Mapping[str, bool]
) -> Iterator[MeshSizes]:
    """The degrees of a strategy: tp within a node, pp at most the layers, dp the rest, which divides the batch."""
    world, node = world_size(config), int(config["cluster"]["processes"])
    batch, layers = config["train"]["global_batch_size"], config["model"].get("num_layers") or 1

    def degrees(axis: str, limit: int, most: int) -> list[int]:
        if axis not in section:
            return [1]
        asked = fixed.get(axis)
        if asked not in (None, -1):
            return [asked] if asked >= 1 and limit % asked == 0 else []
        # an axis of size 1 would be another, simpler strategy
        return [d for d in divisors(limit) if 1 < d <= most] if can[axis] else []

    cp = section.get("cp", 1)  # as typed: it is not searched over
    for tp in degrees("tp", node, node):
        for pp in degrees("pp", world // tp, layers):
            dp = world // (tp * pp * cp)
            if tp * pp * cp * dp == world and batch % dp == 0 and fixed.get("dp", -1) in (None, -1, dp):
                yield MeshSizes(pp, dp, tp, cp)


def choices_of(
    section: Mapping[str, Any], fixed: Mapping[str, Any], config: Mapping[str, Any]
) -> dict[str, tuple[Any, ...]]:
    """The values to try for each untyped setting. Offload comes first, so that its variants come last."""
    options: dict[str, tuple[Any, ...]] = {}
    stage = section.get("stage", 0)
    if "offload" in section:
        options["offload"] = ("none", "cpu")
    if "offload_params" in section and stage == 3:
        options["offload_params"] = ("none", "cpu")
    if "sharding" in section:
        options["sharding"] = ("full", "grad_op", "hybrid")
    if "mode" in section:
        options["mode"] = (section["mode"],) if section["mode"] in SERVED else ("sharded_ddp", "oss")
    if "schedule" in section:
        options["schedule"] = ("1f1b", "interleaved_1f1b", "zbv", "gpipe")
        options["stages_per_rank"] = STAGES
    if "data" in section:
        options["data"] = ("fsdp", "ddp")
    if "sequence_parallel" in section:
        options["sequence_parallel"] = (False, True)
        options["loss_parallel"] = (False, True)
    return {key: (fixed[key],) if key in fixed else values for key, values in options.items()}


def normal(section: dict[str, Any], sizes: MeshSizes, fixed: Mapping[str, Any]) -> dict[str, Any]:
    """Reset settings without effect to their defaults, so that no layout appears twice."""
    if sizes.token_ranks == 1 and "data" in section and "data" not in fixed:
        section["data"] = "fsdp"
    if section.get("schedule") != "interleaved_1f1b" and "stages_per_rank" in section:
        section["stages_per_rank"] = fixed.get("stages_per_rank", 2)
    return section


def sensible(section: dict[str, Any], sizes: MeshSizes, config: Mapping[str, Any], fixed: Mapping[str, Any]) -> bool:
    """Skip variants that another frame covers as well: valid, but not worth predicting."""
    node = int(config["cluster"]["processes"])
    if section.get("loss_parallel") and sizes.tp > 1 and classifies(config["model"]):
        return False  # the model rejects it: it shards logits by vocabulary, and a few classes are not sharded
    if section.get("sequence_parallel") != section.get("loss_parallel") and not {*fixed} & {*PARALLEL}:
        if classifies(config["model"]):
            return True
        # both shard activations over the same ranks; use one alone only if both together are rejected
        try:
            both = {**section, **dict.fromkeys(PARALLEL, True)}
            strategy.check_tensor(both, config["model"], config["data"], config["cluster"], sizes)
        except ValueError:
            return True
        return False
    if section.get("offload_params") == "cpu" and section.get("offload") != "cpu":
        return False
    if section.get("sharding") in ("grad_op", "hybrid") and (sizes.token_ranks == 1 or section.get("offload") == "cpu"):
        return False
    return section.get("sharding") != "hybrid" or section.get("replica_size") is not None or sizes.token_ranks > node


def classifies(model: Mapping[str, Any]) -> bool:
    return model.get("task") == "classify" or model["_target_"] == "dtrain.models.vit.ViT"


@functools.cache
def divisors(number: int) -> list[int]:
    small = [d for d in range(1, math.isqrt(number) + 1) if number % d == 0]
    return sorted({*small, *(number // d for d in small)})
