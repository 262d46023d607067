"""All layouts of a model on a cluster that the launcher would accept, predicted and ranked.

A frame is a layout less its micro-batch and checkpointing: strategy, degrees, sharding, schedule. Its rules are checked
once, by the launcher's own functions. Memory comes before time: in each frame the micro-batch grows until it does not
fit, and only what fits is timed. What costs time and only saves memory (checkpointing, offload) is tried where the
plainer way does not fit.
"""

from __future__ import annotations

import bisect
import functools
import itertools
import math
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from dtrain.config import ranks_per_node, world_size
from dtrain.mesh import MeshSizes
from dtrain.plan.layout import Layout, layout_of
from dtrain.plan.predict import Prediction, Task, predict_layout, task_of, with_time
from dtrain.plan.settings import CHOSEN, check_layout, strategy_section
from dtrain.schema import has_method
from dtrain.strategies import rules

# Simplest first: what a person would rather run when two are equally fast. local_sgd is not among them: it computes
# something else, so it is only planned for when it is asked for.
STRATEGIES = ("ddp", "fsdp", "zero1", "zero2", "zero3", "fairscale", "tensor", "pipeline", "3d")
CHECKPOINTING = ("none", "selective", "full")
PARALLEL = ("sequence_parallel", "loss_parallel")
TIE = 1.01  # step times this close are equal: the prediction is not better than that
STAGES = (2, 4)  # a rank of an interleaved pipeline; more make many small messages


@dataclass(frozen=True)
class Frame:
    """One strategy with its degrees and variants: the section as the launcher would compose it."""

    name: str
    section: dict[str, Any]
    sizes: MeshSizes


def search(
    config: Mapping[str, Any], typed: Collection[str] = (), task: Task | None = None, time_unfit: bool = True
) -> list[Prediction]:
    """Best first; those that do not fit after those that do. typed: the settings that stay as they are composed.

    time_unfit=False leaves out the time of those that do not fit. Empty when the model or the hardware is not known, or
    when no layout keeps the rules.
    """
    found = candidates(config, typed, task)
    return rank([with_time(p) if time_unfit or p.fits is not False else p for p in found])


def candidates(config: Mapping[str, Any], typed: Collection[str] = (), task: Task | None = None) -> list[Prediction]:
    """The layouts to choose from, with their memory; without time and in no order."""
    task = task or task_of(config)
    if task is None:
        return []
    config = {**config, "cluster": {**config["cluster"], "processes": ranks_per_node(config["cluster"])}}
    found: list[Prediction] = []
    held: set[tuple[str, int, int]] = set()  # strategies and degrees of which something fits on the GPUs alone
    for frame in frames(config, typed):
        key = (frame.name, frame.sizes.tp, frame.sizes.pp)
        if frame.section.get("offload") == "cpu" and "strategy.offload" not in typed and key in held:
            continue
        members = fitting(frame, config, typed, task)
        if members and members[0].fits:
            held.add(key)
        found += members
    return found


def rank(found: list[Prediction]) -> list[Prediction]:
    """Fitting ones by step time, of equally fast ones the simplest first; then the others, by what they lack."""
    timed = sorted((p for p in found if p.fits is not False), key=seconds)
    ranked: list[Prediction] = []
    while timed:
        count = bisect.bisect_right(timed, seconds(timed[0]) * TIE, key=seconds)
        ranked += sorted(timed[:count], key=lambda p: complexity(p.layout))
        timed = timed[count:]
    return ranked + sorted((p for p in found if p.fits is False), key=lambda p: -(p.room or 0.0))


def seconds(prediction: Prediction) -> float:
    return prediction.step_s or 0.0


def complexity(layout: Layout) -> tuple[int, ...]:
    """How much there is to understand, tune and break; less is better when the speed is the same."""
    order = STRATEGIES.index(layout.strategy) if layout.strategy in STRATEGIES else len(STRATEGIES)
    variants = [
        layout.data == "grad_op",
        layout.replica_size is not None,
        layout.sequence_parallel,
        layout.loss_parallel,
        layout.schedule != "1f1b",
        layout.strategy in ("tensor", "pipeline", "3d") and layout.data == "ddp" and layout.dp > 1,
    ]
    offloads = (layout.offload != "none") + (layout.offload_params != "none")
    checkpointing = CHECKPOINTING.index(layout.activation_checkpointing)
    return (offloads, order, checkpointing, sum(variants), layout.tp * layout.pp, layout.micro_batches)


# ---- the layouts of a frame ----------------------------------------------------------------------------------


def fitting(frame: Frame, config: Mapping[str, Any], typed: Collection[str], task: Task) -> list[Prediction]:
    """The frame's layouts that fit, each micro-batch with the least checkpointing; else the one that lacks least."""
    modes = CHECKPOINTING if "activation_checkpointing" not in typed else (config["activation_checkpointing"],)
    per_rank = task.global_batch_size // frame.sizes.dp
    asked = config["train"]["micro_batch_size"] if "train.micro_batch_size" in typed else None
    sizes = [min(asked, per_rank)] if asked else divisors(per_rank)
    if frame.section.get("schedule") == "gpipe" and "strategy.schedule" not in typed:  # 1f1b needs less memory
        sizes = [size for size in sizes if per_rank // size < frame.sizes.pp]
    sizes = [size for size in sizes if per_rank % size == 0 and accepted(frame, config, per_rank // size)]
    if not sizes:
        return []
    base = base_layout(frame, config)
    found: dict[int, Prediction] = {}
    least: Prediction | None = None
    for mode in modes:
        for size in sizes:
            if size in found:  # with less checkpointing, so faster
                continue
            layout = replace(base, micro_batch_size=size, micro_batches=per_rank // size, activation_checkpointing=mode)
            prediction = predict_layout(layout, task, timed=False)
            if prediction.fits is False:  # nor would more samples
                if least is None or prediction.memory_bytes < least.memory_bytes:
                    least = prediction
                break
            found[size] = prediction
    return list(found.values()) or ([least] if least else [])


def accepted(frame: Frame, config: Mapping[str, Any], micro_batches: int) -> bool:
    """Would the launcher take it? Its own rules say so; only those that look at the launching machine are left out."""
    try:
        check_layout({**config, "strategy": frame.section}, frame.sizes, micro_batches, plans=False)
    except ValueError:
        return False
    return True


def base_layout(frame: Frame, config: Mapping[str, Any]) -> Layout:
    """The frame as a layout; the micro-batch is filled in by the caller."""
    choices = {**config["choices"], "strategy": frame.name}
    axes = {axis: size for axis, size in frame.sizes.as_dict().items() if axis in frame.section}
    train = {**config["train"], "micro_batch_size": 1}
    return layout_of({**config, "strategy": {**frame.section, **axes}, "choices": choices, "train": train})


@functools.cache
def divisors(number: int) -> list[int]:
    small = [d for d in range(1, math.isqrt(number) + 1) if number % d == 0]
    return sorted({*small, *(number // d for d in small)})


# ---- the frames of a cluster ---------------------------------------------------------------------------------


def frames(config: Mapping[str, Any], typed: Collection[str]) -> Iterator[Frame]:
    """Every strategy with every degree and variant that the typed settings leave open; offload last."""
    chosen = config["choices"]["strategy"]
    names = (chosen,) if "strategy" in typed else STRATEGIES
    fixed = {key: config["strategy"].get(key) for key in CHOSEN if f"strategy.{key}" in typed}
    target = config["model"]["_target_"]
    can = {"tp": has_method(target, "tp_plan") is not False, "pp": has_method(target, "pipeline_split") is not False}
    for name in names:
        section = dict(config["strategy"]) if name == chosen else strategy_section(name)
        if any(value != NEUTRAL.get(key, value) for key, value in fixed.items() if key not in section):
            continue  # what was typed is not for this strategy
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


# of a setting that a strategy does not have: the value that says the same as not having it
NEUTRAL: dict[str, Any] = {
    "tp": 1, "pp": 1, "sequence_parallel": False, "loss_parallel": False, "offload": "none", "offload_params": "none",
    "replica_size": None, "sharding": "", "schedule": "", "stages_per_rank": "", "mode": "", "data": "",
}  # fmt: skip


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
        # one of this strategy's axes of size 1 would be another, simpler strategy
        return [d for d in divisors(limit) if 1 < d <= most] if can[axis] else []

    for tp in degrees("tp", node, node):
        for pp in degrees("pp", world // tp, layers):
            dp = world // (tp * pp)
            if tp * pp * dp == world and batch % dp == 0 and fixed.get("dp", -1) in (None, -1, dp):
                yield MeshSizes(pp, dp, tp)


def choices_of(
    section: Mapping[str, Any], fixed: Mapping[str, Any], config: Mapping[str, Any]
) -> dict[str, tuple[Any, ...]]:
    """The values to try of each setting that is not typed. Offload comes first, so that its variants come last."""
    options: dict[str, tuple[Any, ...]] = {}
    stage = section.get("stage", 0)
    if "offload" in section:
        options["offload"] = ("none", "cpu")
    if "offload_params" in section and stage == 3:
        options["offload_params"] = ("none", "cpu")
    if "sharding" in section:
        options["sharding"] = ("full", "grad_op", "hybrid")
    if "mode" in section:
        options["mode"] = ("sharded_ddp", "oss")
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
    """The section with settings that mean nothing here at their defaults, so that no layout comes twice."""
    if sizes.dp == 1 and "data" in section and "data" not in fixed:
        section["data"] = "fsdp"
    if section.get("schedule") != "interleaved_1f1b" and "stages_per_rank" in section:
        section["stages_per_rank"] = fixed.get("stages_per_rank", 2)
    return section


def sensible(section: dict[str, Any], sizes: MeshSizes, config: Mapping[str, Any], fixed: Mapping[str, Any]) -> bool:
    """Leaves out what another frame does as well: it is not refused, only not worth a look."""
    node = int(config["cluster"]["processes"])
    if section.get("sequence_parallel") != section.get("loss_parallel") and not {*fixed} & {*PARALLEL}:
        # both cut activations over the same ranks; one alone only where both are refused
        try:
            both = {**section, **dict.fromkeys(PARALLEL, True)}
            rules.check_tensor(both, config["model"], config["data"], config["cluster"], sizes)
        except ValueError:
            return True
        return False
    if section.get("offload_params") == "cpu" and section.get("offload") != "cpu":
        return False
    if section.get("sharding") in ("grad_op", "hybrid") and (sizes.dp == 1 or section.get("offload") == "cpu"):
        return False
    return section.get("sharding") != "hybrid" or section.get("replica_size") is not None or sizes.dp > node


# ---- as a person types it ------------------------------------------------------------------------------------


def words(prediction: Prediction, config: Mapping[str, Any]) -> list[str]:
    """The overrides to type for that layout, on top of what is in the configuration."""
    layout = prediction.layout
    section = strategy_section(layout.strategy)
    wanted: dict[str, Any] = {"tp": layout.tp, "pp": layout.pp}
    wanted |= {"sequence_parallel": layout.sequence_parallel, "loss_parallel": layout.loss_parallel}
    wanted |= {"offload": layout.offload, "offload_params": layout.offload_params, "schedule": layout.schedule}
    if layout.schedule == "interleaved_1f1b":
        wanted["stages_per_rank"] = layout.stages_per_rank
    if "data" in section:
        wanted["data"] = layout.data
    if layout.strategy == "fairscale":
        wanted["mode"] = layout.data
    if layout.strategy == "fsdp":
        wanted["sharding"] = "hybrid" if layout.replica_size else "grad_op" if layout.data == "grad_op" else "full"
        if layout.replica_size not in (None, ranks_per_node(config["cluster"])):
            wanted["replica_size"] = layout.replica_size
    typed = [f"strategy={layout.strategy}"]
    for key, value in wanted.items():
        if key in section and (value != section[key] or key in ("tp", "pp")):
            typed.append(f"strategy.{key}={str(value).lower() if isinstance(value, bool) else value}")
    if config["train"]["micro_batch_size"] != layout.micro_batch_size:
        typed.append(f"train.micro_batch_size={layout.micro_batch_size}")
    if config["activation_checkpointing"] != layout.activation_checkpointing:
        typed.append(f"activation_checkpointing={layout.activation_checkpointing}")
    return typed
