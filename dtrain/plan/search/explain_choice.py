"""Why the first layout of a plan was chosen: the usual decision tree, with this plan's numbers.

Does it fit on one GPU? ddp. Is only the optimizer state too large? zero1 or zero2. The weights too? fsdp. Is a layer
too large or the batch too small for that? tensor, within a node. Slow links between nodes? pipeline. All of it? 3d.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from dtrain.config.hardware import world_size
from dtrain.plan.layout import Layout
from dtrain.plan.model_shape import Convolutions
from dtrain.plan.predict import GIB, TIE, Prediction, predict_layout, with_time
from dtrain.plan.report import faster_tight, lacking, step_time, variants
from dtrain.plan.search.search import AVERAGE_ERROR, UNCLOCKED, divisors
from dtrain.util.format import gib

# what each strategy of the tree does to solve the previous one's problem
DOES = {
    "ddp": "with the whole model on every GPU",
    "horovod": "with the whole model on every GPU",
    "ring": "with the whole model on every GPU, and gradients in one tensor to be sent,",
    "diloco": "with the whole model, outer weights and their momentum on every GPU",
    "zero1": "with optimizer state sharded over {dp}",
    "zero2": "with gradients and optimizer state sharded over {dp}",
    "fairscale": "with optimizer state sharded over {dp}",
    "fsdp": "with weights, gradients and optimizer state sharded over {shards}",
    "zero3": "with weights, gradients and optimizer state sharded over {dp}",
    "tensor": "with each layer sharded over {tp} of a node",
    "pipeline": "with the layers split into stages on {pp}, and only small send/recv between them",
    "3d": "with each layer sharded over {tp} of a node, and the layers split into {groups} pipeline stages",
}
OFF = f"{AVERAGE_ERROR:.0%}"
ERROR = f"the planner is {OFF} off on average"
TREE = ("ddp", "fsdp", "tensor", "pipeline", "3d")  # in the order of the decision tree
AFTER_DDP = ("zero1", "zero2", "fairscale")  # between ddp and fsdp, if only the optimizer state is too large


def why(found: Sequence[Prediction], config: Mapping[str, Any], one_strategy: bool = False) -> str:
    """Explain the first prediction of a search; or what is lacking if nothing fits."""
    best = found[0]
    if best.fits is False:
        return f"Nothing fits: {name(best.layout)} comes closest, but it {lacking(best)}. {way_out(best)}"
    layout = best.layout
    counts = {"dp": layout.dp, "tp": layout.tp, "pp": layout.pp, "shards": layout.replica_size or layout.token_ranks}
    texts = {key: gpus(count) for key, count in counts.items()}
    does = DOES.get(layout.strategy, "").format(**texts, groups=layout.pp)
    does = "on one GPU" if layout.world_size == 1 and "sharded" in does else does
    limit = f" of {gib(best.task.limit / GIB)}" if best.task.limit else ""
    needs = f"it needs {gib((best.memory_bytes + best.reserve) / GIB)}{limit} a GPU{extras(best)}{little_room(best)}"
    if one_strategy:
        return f"{name(best.layout)}: {does} {needs}.{against_next(found)}"
    before = simpler_than(best.layout.strategy)
    reasons = [reason for simpler in before if (reason := against(simpler, best, found))]
    batch, ranks = config["train"]["global_batch_size"], world_size(config)
    if batch % ranks and "fsdp" in before:
        reasons.insert(0, f"ddp and fsdp need a batch that divides over {ranks} GPUs, but it has {batch} samples")
    return f"{name(best.layout)}: {'; '.join([*reasons, f'{does} {needs}'])}."


def gpus(count: int) -> str:
    return "1 GPU" if count == 1 else f"{count} GPUs"


def little_room(best: Prediction) -> str:
    """Warn if the chosen layout leaves almost no memory free."""
    return f", which is tight: {gib((best.room or 0.0) / GIB)} is left" if best.tight else ""


def faster_micro_batch(best: Prediction) -> list[str]:
    """Suggest another micro-batch size of the same layout if it fits and is clearly faster."""
    layout, step_s = best.layout, best.step_s
    per_rank = layout.micro_batch_size * layout.micro_batches
    if not step_s or isinstance(best.task.shape, Convolutions):  # batch norm: the result would differ
        return []
    others = []
    for size in divisors(per_rank):
        if size != layout.micro_batch_size and per_rank // size % layout.pp == 0:  # every schedule accepts such a count
            other = replace(layout, micro_batch_size=size, micro_batches=per_rank // size)
            prediction = predict_layout(other, best.task, timed=False)
            if prediction.fits is False:
                break
            others.append(with_time(prediction))
    fastest = min(others, key=lambda p: p.step_s or step_s, default=best)
    gain = step_s / (fastest.step_s or step_s) - 1
    return (
        [f"train.micro_batch_size={fastest.layout.micro_batch_size} would be {gain:.0%} faster"] if gain > 0.03 else []
    )


def name(layout: Layout) -> str:
    """Name a layout in a sentence: `3d, tp 8 × pp 4 × dp 2`."""
    axes = {"tp": layout.tp, "pp": layout.pp, "cp": layout.cp, "dp": layout.dp}
    degrees = " × ".join(f"{axis} {size}" for axis, size in axes.items() if size > 1)
    return f"{layout.strategy}, {degrees}" if layout.tp * layout.pp * layout.cp > 1 else layout.strategy


def simpler_than(strategy: str) -> tuple[str, ...]:
    """Return the strategies that come before this one in the tree."""
    if strategy in TREE:
        return TREE[: TREE.index(strategy)]
    return ("ddp",) if strategy in AFTER_DDP else ("ddp", "fsdp")


def against(simpler: str, best: Prediction, found: Sequence[Prediction]) -> str:
    """Explain why not the simpler strategy: it does not fit, or it is slower; "" if neither."""
    other = next((p for p in found if p.layout.strategy == simpler), None)
    if other is None:
        return ""
    if other.fits is False:
        return f"{simpler} would need {gib((other.memory_bytes + other.reserve) / GIB)} a GPU"
    if not other.step_s or not best.step_s:
        return ""
    slower = other.step_s / best.step_s - 1
    return f"{simpler} fits, but is {slower:.0%} slower ({step_time(other.step_s)} a step)" if slower > TIE - 1 else ""


def extras(prediction: Prediction) -> str:
    """Describe what else was needed to make it fit."""
    layout, parts = prediction.layout, []
    if layout.activation_checkpointing != "none":
        parts.append(f"{layout.activation_checkpointing} activation checkpointing")
    if layout.offload != "none":
        parts.append(f"offload to {layout.offload}")
    return f" with {' and '.join(parts)}" if parts else ""


def against_next(found: Sequence[Prediction]) -> str:
    """Compare with the second-best layout of the same strategy; a tight one may be faster than the first."""
    fitting = [p for p in found[1:] if p.fits is not False and p.step_s]
    others = fitting if found[0].tight else [p for p in fitting if not p.tight]
    if not others or not found[0].step_s:
        return ""
    slower = (others[0].step_s or 0.0) / found[0].step_s - 1
    room = " with room to spare" if len(others) < len(fitting) else ""
    behind = f"{slower:.0%} slower" if slower >= TIE - 1 else "no slower, but less simple"
    return f" It is the fastest of {len(others) + 1} layouts that fit{room}; the next is {behind}."


def way_out(best: Prediction) -> str:
    layout = best.layout
    if layout.activation_checkpointing != "full":
        return "Try activation_checkpointing=full."
    return "More GPUs, a smaller model or shorter samples: --gpus-for 30d finds how many."


def order_notes(shown: Sequence[Prediction]) -> list[str]:
    """Explain a table in which a row is faster than one above it: it is tight, or its strategy was never timed."""
    slowest, late = 0.0, []
    for prediction in shown:
        if prediction.fits is True and prediction.step_s:
            late += [prediction] if prediction.step_s * TIE < slowest else []
            slowest = max(slowest, prediction.step_s)
    notes = tight_note(shown)
    what = ["tight layouts"] if not notes and any(p.tight for p in late) else []
    if any(p.layout.strategy in UNCLOCKED for p in late):
        what.append(f"{', '.join(UNCLOCKED)}, of which no run of ours has timed a step,")
    if what:
        notes.append(f"the order counts steps of {' and of '.join(what)} as {OFF} longer: {ERROR}")
    return notes


def tight_note(found: Sequence[Prediction]) -> list[str]:
    """Name a layout that is faster than the first, but not first because it is tight."""
    faster = faster_tight(found)
    if faster is None or not faster.step_s or not faster.task.limit:
        return []
    gain = (found[0].step_s or 0.0) / faster.step_s - 1
    used = (faster.memory_bytes + faster.reserve) / faster.task.limit
    return [
        f"{label(faster)} is {gain:.0%} faster but would use {used:.0%} of the memory; a tight layout is first only if "
        f"it is more than {OFF} faster: {ERROR}"
    ]


def label(prediction: Prediction) -> str:
    """Name a row of the table: `fsdp, grad_op, micro-batch 4, full checkpointing`."""
    layout = prediction.layout
    mode = layout.activation_checkpointing
    words = [name(layout), variants(prediction), f"micro-batch {layout.micro_batch_size}"]
    return ", ".join(word for word in (*words, "" if mode == "none" else f"{mode} checkpointing") if word)
