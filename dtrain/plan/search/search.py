"""All layouts of a model on a cluster that the launcher would accept, predicted and ranked.

A frame is a layout without its micro-batch size and checkpointing: strategy, degrees, sharding, schedule. The
launcher's own functions check its rules once. Memory comes before time: in each frame the micro-batch grows until it
does not fit, and only what fits is timed; pipelines are timed first, because that is less work. Options that only save
memory and cost time (checkpointing, offload) are tried only if the plain layout does not fit.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from typing import Any

from dtrain.checks.context import attends_by_blocks
from dtrain.config.hardware import ranks_per_node
from dtrain.config.mesh import MeshSizes
from dtrain.plan.layout import Layout, compile_of, layout_of
from dtrain.plan.ledger import total
from dtrain.plan.predict import TIE, Prediction, Task, least_time_of, predict_layout, task_of, time_of, with_time
from dtrain.plan.search.candidates import STRATEGIES, Frame, frames
from dtrain.plan.search.candidates import divisors as divisors
from dtrain.plan.sections import check_layout, check_micro_batches, strategy_section

CHECKPOINTING = ("none", "ops", "selective", "full")  # cheapest first
NEAR = 1.25  # pipelines that cannot come this close to the best layout without a pipeline are skipped
# Mean error over the 900 published steps of benchmarks/planner. A lead below it may not be real: it is not enough for
# strategies of which we never timed a step, nor for a layout that may run out of memory.
AVERAGE_ERROR = 0.09
LEAD = 1 + AVERAGE_ERROR
UNCLOCKED = ("tensor", "pipeline", "3d")


def search(
    config: Mapping[str, Any],
    typed: Collection[str] = (),
    task: Task | None = None,
    time_unfit: bool = True,
    everything: bool = False,
    only_best: bool = False,
) -> list[Prediction]:
    """Best first; those that fit before those that do not. typed: the settings that must not change.

    time_unfit=False skips the time of layouts that do not fit; everything=True keeps slow pipelines too; only_best=True
    skips layouts that cannot be the first. Empty if the model or the hardware is unknown, or if no layout satisfies the
    rules.
    """
    found = candidates(config, typed, task, everything, only_best)
    return rank([with_time(p) if time_unfit or p.fits is not False else p for p in found])


def candidates(
    config: Mapping[str, Any],
    typed: Collection[str] = (),
    task: Task | None = None,
    everything: bool = False,
    only_best: bool = False,
) -> list[Prediction]:
    """Return the layouts to choose from, with their memory; unordered."""
    task = task or task_of(config)
    if task is None:
        return []
    config = {**config, "cluster": {**config["cluster"], "processes": ranks_per_node(config["cluster"])}}
    everything = everything or "strategy" in typed
    found = predicted(config, typed, task, everything, only_best)
    if everything or any(p.fits is not False for p in found):
        return found
    return predicted(config, typed, task, True, only_best)


def predicted(
    config: Mapping[str, Any], typed: Collection[str], task: Task, everything: bool, only_best: bool
) -> list[Prediction]:
    """Return the layouts of all frames. everything: include pipelines that cannot come near the best other layout."""
    found: list[Prediction] = []
    held: set[tuple[str, int, int]] = set()  # strategies and degrees that fit without offload
    first: dict[str, MeshSizes] = {}
    limits, best_s = Limits(), math.inf
    for frame in frames(config, typed):
        key = (frame.name, frame.sizes.tp, frame.sizes.pp)
        if frame.section.get("offload") == "cpu" and "strategy.offload" not in typed and key in held:
            continue
        if frame.sizes.pp > 1 and not everything and limits == Limits():
            found = [with_time(p) for p in found]
            limits = limits_by(found)
        smallest = first.setdefault(frame.name, frame.sizes) == frame.sizes  # so that each strategy has a layout
        allowed = replace(limits, step_s=math.inf) if smallest else limits
        if only_best:
            allowed = replace(limits, step_s=min(limits.step_s, TIE * best_s / handicap(frame.name)))
        members = fitting(frame, config, typed, task, allowed)
        if only_best:
            members = [with_time(p) if p.fits else p for p in members]
            best_s = min([best_s, *(cautious(p) for p in members if p.fits)])
        if members and members[0].fits is not False:
            held.add(key)
        found += members
    return found


@dataclass(frozen=True)
class Limits:
    """Limits for pipelines worth predicting: idle time relative to work, and step time."""

    idle: float = math.inf
    step_s: float = math.inf


def limits_by(found: list[Prediction]) -> Limits:
    """Derive limits from the best layout without a pipeline: a pipeline computes as long, and waits in addition."""
    best = min((p for p in found if p.fits is not False and p.step_s), key=seconds, default=None)
    if best is None or best.time is None:
        return Limits(idle=1.0)
    step_s = NEAR * seconds(best)
    return Limits(min(1.0, step_s / total(best.time, "compute") - 1), step_s)


def rank(found: list[Prediction]) -> list[Prediction]:
    """Layouts that fit by step time, simplest first among equals; then the others, by missing memory.

    A strategy that was never timed ranks before a data-parallel one only with a lead, and so does a tight layout before
    one with room to spare. Layouts for which the fit is unknown come after those that fit.
    """
    ranked: list[Prediction] = []
    for fits in (True, None):
        timed = sorted((p for p in found if p.fits is fits), key=cautious)
        while timed:
            count = bisect.bisect_right(timed, cautious(timed[0]) * TIE, key=cautious)
            ranked += sorted(timed[:count], key=lambda p: (p.tight, complexity(p.layout)))
            timed = timed[count:]
    return ranked + sorted((p for p in found if p.fits is False), key=lacks)


def lacks(prediction: Prediction) -> float:
    """Bytes that a layout lacks to fit, of the GPU's memory or of the host's."""
    return max(-(prediction.room or 0.0), -(prediction.host_room or 0.0))


def seconds(prediction: Prediction) -> float:
    return prediction.step_s or 0.0


def cautious(prediction: Prediction) -> float:
    """The step time used for ranking."""
    return seconds(prediction) * handicap(prediction.layout.strategy) * (LEAD if prediction.tight else 1.0)


def handicap(strategy: str) -> float:
    return LEAD if strategy in UNCLOCKED else 1.0


def complexity(layout: Layout) -> tuple[int, ...]:
    """How much there is to understand, tune and break; used as a tie-breaker."""
    order = STRATEGIES.index(layout.strategy) if layout.strategy in STRATEGIES else len(STRATEGIES)
    variants = [
        layout.data == "grad_op",
        layout.replica_size is not None,
        layout.sequence_parallel,
        layout.loss_parallel,
        layout.schedule != "1f1b",
        layout.strategy in ("tensor", "pipeline", "3d") and layout.data == "ddp" and layout.token_ranks > 1,
    ]
    offloads = (layout.offload != "none") + (layout.offload_params != "none")
    checkpointing = CHECKPOINTING.index(layout.activation_checkpointing)
    return (offloads, order, checkpointing, sum(variants), layout.tp * layout.pp, layout.micro_batches)


# ---- the layouts of a frame ----------------------------------------------------------------------------------


def fitting(
    frame: Frame, config: Mapping[str, Any], typed: Collection[str], task: Task, limits: Limits
) -> list[Prediction]:
    """Return the frame's layouts that fit, each micro-batch with the least checkpointing; else the closest to fitting.

    Where that is tight, the micro-batch comes with more checkpointing, too.

    Larger micro-batches need more memory, with two exceptions that are always predicted: a single pass accumulates no
    gradients, and with fewer passes a pipeline has fewer casts of its weights in flight.
    """
    modes = (config["activation_checkpointing"],) if "activation_checkpointing" in typed else modes_of(frame)
    per_rank = task.global_batch_size // frame.sizes.dp
    asked = config["train"]["micro_batch_size"] if "train.micro_batch_size" in typed else None
    sizes = [min(asked, per_rank)] if asked else divisors(per_rank)
    if frame.section.get("schedule") == "gpipe" and "strategy.schedule" not in typed:  # 1f1b needs less memory
        sizes = [size for size in sizes if per_rank // size < frame.sizes.pp]
    base = base_layout(frame, config)
    sizes = [size for size in sizes if idle(base.pp, base.stages_per_rank, per_rank // size) <= limits.idle]
    if not accepted(frame, config):
        return []
    sizes = [size for size in sizes if per_rank % size == 0 and accepts(frame, config, per_rank // size)]
    layouts = [replace(base, micro_batch_size=s, micro_batches=per_rank // s) for s in sizes]
    if limits.step_s < math.inf:  # predicting a pipeline's time takes half as long as its memory
        plain = [in_mode(layout, modes[0], frame, config) for layout in layouts]
        layouts = [
            layout
            for layout in plain
            if least_time_of(layout, task) <= limits.step_s and total(time_of(layout, task) or ()) <= limits.step_s
        ]
    found: list[Prediction] = []
    roomy: set[int] = set()  # micro-batches that fit with room to spare: more checkpointing is only slower
    least: Prediction | None = None
    for mode in modes:
        full = False
        for layout in layouts:
            if layout.micro_batch_size in roomy:
                continue
            if full and layout.pp == 1 and layout.micro_batches > 1:
                continue
            prediction = predict_layout(in_mode(layout, mode, frame, config), task, timed=False)
            if prediction.fits is False:
                if least is None or prediction.memory_bytes < least.memory_bytes:
                    least = prediction
                full = True
                continue
            found.append(prediction)
            roomy |= set() if prediction.tight else {layout.micro_batch_size}
    return found or ([least] if least else [])


def in_mode(layout: Layout, mode: str, frame: Frame, config: Mapping[str, Any]) -> Layout:
    """Return the layout with this kind of checkpointing, and the compile mode that goes with it."""
    asked = {**config, "strategy": frame.section, "activation_checkpointing": mode}
    return replace(layout, activation_checkpointing=mode, compile=compile_of(asked, layout.world_size))


def modes_of(frame: Frame) -> tuple[str, ...]:
    """Without `ops` where the launcher refuses it.

    zbv splits the backward pass in two, and what `ops` keeps can be used once; under strategy.cp it would keep the
    attention to each rank's keys.
    """
    splits = frame.section.get("schedule") == "zbv"
    refused = splits or attends_by_blocks(frame.sizes.cp, frame.section.get("cp_kind", ""))
    return tuple(mode for mode in CHECKPOINTING if mode != "ops" or not refused)


def idle(pp: int, stages: int, micro_batches: int) -> float:
    """Minimum idle time of a pipeline's ranks, relative to their work.

    In slots of one stage: a rank works for micro_batches × stages. It starts up to pp - 1 slots late, and the first
    micro-batch must pass all pp × stages, followed by the others.
    """
    works = micro_batches * stages
    return max(works + pp - 1, pp * stages + micro_batches - 1) / works - 1


def accepted(frame: Frame, config: Mapping[str, Any]) -> bool:
    """Would the launcher accept it? Applies its own rules, except those that inspect the launching machine."""
    try:
        check_layout({**config, "strategy": frame.section}, frame.sizes, plans=False)
    except ValueError:
        return False
    return True


def accepts(frame: Frame, config: Mapping[str, Any], micro_batches: int) -> bool:
    """Would it also accept this many micro-batches? Only a pipeline has rules for them."""
    try:
        check_micro_batches({**config, "strategy": frame.section}, frame.sizes, micro_batches)
    except ValueError:
        return False
    return True


def base_layout(frame: Frame, config: Mapping[str, Any]) -> Layout:
    """Return the frame as a layout; the caller fills in the micro-batch."""
    choices = {**config["choices"], "strategy": frame.name}
    axes = {axis: size for axis, size in frame.sizes.as_dict().items() if axis in frame.section}
    train = {**config["train"], "micro_batch_size": 1}
    return layout_of({**config, "strategy": {**frame.section, **axes}, "choices": choices, "train": train})


# ---- as overrides --------------------------------------------------------------------------------------------


def overrides_of(prediction: Prediction, config: Mapping[str, Any]) -> list[str]:
    """Return the overrides for this layout, on top of the configuration."""
    layout = prediction.layout
    section = strategy_section(layout.strategy)
    wanted: dict[str, Any] = {"tp": layout.tp, "pp": layout.pp, "cp": layout.cp}
    if layout.cp > 1:
        wanted["cp_kind"] = layout.cp_kind
    wanted |= {"sequence_parallel": layout.sequence_parallel, "loss_parallel": layout.loss_parallel}
    wanted |= {"offload": layout.offload, "offload_params": layout.offload_params, "schedule": layout.schedule}
    if layout.schedule == "interleaved_1f1b":
        wanted["stages_per_rank"] = layout.stages_per_rank
    if "data" in section:
        wanted["data"] = layout.data
    if layout.strategy in ("fairscale", "ps"):
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
