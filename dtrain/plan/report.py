"""A plan in human-readable form: the table, the lines below it, and the arithmetic of --explain."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from dtrain.config.hardware import world_size
from dtrain.plan.ledger import Item, by_part
from dtrain.plan.parameters import num_parameters
from dtrain.plan.predict import GIB, TIE, Prediction, Task
from dtrain.util.format import duration, gib, number, percent, si
from dtrain.util.format import step_time as short_time

HEADINGS = {
    "strategy": "strategy", "degrees": "degrees", "micro": "micro", "checkpointing": "checkpoint", "more": "with",
    "memory": "memory", "states": "states", "activations": "activations", "logits": "logits", "rest": "rest",
    "fits": "fits", "step": "step", "compute": "compute", "communication": "comm", "bubble": "bubble",
    "optimizer": "optim", "tokens": "tok/s", "mfu": "MFU", "time": "time", "hours": "GPU-hours", "cost": "cost",
}  # fmt: skip
NUMBERS = {"micro", "memory", "states", "activations", "logits", "rest", "step", "compute", "communication", "bubble",
           "optimizer", "tokens", "mfu", "time", "hours", "cost"}  # fmt: skip
# columns that a narrow terminal drops first; never the layout, whether it fits, its time and its cost
LEAST_NEEDED = ("rest", "logits", "optimizer", "bubble", "states", "activations", "compute", "communication", "mfu",
                "hours", "more", "tokens", "memory")  # fmt: skip
LAYOUT = ("strategy", "degrees", "micro", "checkpointing")  # what tells rows apart, with "more"
SLOWER = 1.21  # published runs took up to this much longer than predicted (docs/plan.md, benchmarks/planner)
TOP, UNFIT = 5, 3  # rows: the best of all and of each strategy, and a few that do not fit


def shown(found: Sequence[Prediction], everything: bool = False) -> list[Prediction]:
    """Return the best few, the best of each strategy, and the layout that a note names, in order."""
    if everything:
        return list(found)
    firsts = {p.layout.strategy: p for p in reversed(found)}
    fitting = [p for p in found if p.fits is not False]
    kept = {id(p) for p in (*fitting[:TOP], *firsts.values())}
    rest = [p for p in found if p.fits is False]
    kept |= {id(p) for p in rest[:UNFIT]} if not fitting else set()
    kept |= {id(faster_tight(found))}
    return [p for p in found if id(p) in kept]


def faster_tight(ranked: Sequence[Prediction]) -> Prediction | None:
    """Return the fastest layout that is faster than the first, but not first because it is tight."""
    if not ranked or ranked[0].fits is not True or ranked[0].tight:
        return None
    ahead = [p for p in ranked if p.tight and p.step_s and p.step_s * TIE < (ranked[0].step_s or 0.0)]
    return min(ahead, key=lambda p: p.step_s or 0.0, default=None)


def row(prediction: Prediction) -> dict[str, str]:
    """Return one line of the table, as text by column."""
    layout, memory = prediction.layout, by_part(prediction.memory)
    time = by_part(prediction.time) if prediction.time is not None else {}
    states = sum(memory.get(part, 0.0) for part in ("parameters", "gradients", "optimizer"))
    main = states + memory.get("activations", 0.0) + memory.get("logits", 0.0)
    axes = {"tp": layout.tp, "pp": layout.pp, "cp": layout.cp, "dp": layout.dp}
    return {
        "strategy": layout.strategy,
        "degrees": " ".join(f"{axis} {size}" for axis, size in axes.items() if size > 1 or axis == "dp"),
        "micro": str(layout.micro_batch_size),
        "checkpointing": layout.activation_checkpointing,
        "more": variants(prediction) or "-",
        "memory": gib(memory["total"] / GIB),
        "states": short_gib(states),
        "activations": short_gib(memory.get("activations", 0.0)),
        "logits": short_gib(memory.get("logits", 0.0)),
        "rest": short_gib(memory["total"] - main),
        "fits": lacking(prediction),
        "step": step_time(time.get("total")),
        **{part: step_time(time.get(part)) for part in ("compute", "communication", "bubble", "optimizer")},
        "tokens": si(prediction.tokens_per_s),
        "mfu": percent(prediction.mfu),
        "time": duration(prediction.run_s),
        "hours": si(prediction.gpu_hours),
        "cost": money(prediction.cost),
    }


def step_time(value: object) -> str:
    """Format a step's time with three digits up to 100 seconds, so that the parts can be compared."""
    seconds = number(value)
    return f"{seconds:.1f}s" if seconds is not None and 10 <= seconds < 100 else short_time(value)


def money(value: float | None) -> str:
    """Format a cost as 0.37, 4.60, 1,234."""
    if value is None:
        return "-"
    return f"{value:,.0f}" if value >= 99.5 else f"{value:.2f}" if value >= 0.01 else f"{value:.2g}"


def lacking(prediction: Prediction) -> str:
    """`yes`, `tight`, or how much memory is missing, where most is; with offload the host's memory must be known."""
    room, host = prediction.room, prediction.host_room
    if room is not None and room < min(0.0, host or 0.0):
        return f"lacks {gib(-room / GIB)}"
    if host is not None and host < 0:
        return f"lacks {gib(-host / GIB)} of host memory"
    if room is not None and not host_known(prediction):
        return "host memory not known"
    return "-" if room is None else "tight" if prediction.tight else "yes"


def host_known(prediction: Prediction) -> bool:
    """Is nothing offloaded, or is the host's memory known?"""
    offloads = (prediction.layout.offload, prediction.layout.offload_params)
    return "cpu" not in offloads or prediction.host_room is not None


def short_gib(value: float) -> str:
    return f"{value / GIB:.1f}"


def variants(prediction: Prediction) -> str:
    """Describe other special features of a layout briefly."""
    layout = prediction.layout
    words = [
        "grad_op" if layout.data == "grad_op" else "",
        f"hybrid {layout.replica_size}" if layout.replica_size else "",
        layout.schedule if layout.pp > 1 and layout.schedule != "1f1b" else "",
        f"×{layout.stages_per_rank}" if layout.schedule == "interleaved_1f1b" else "",
        "oss" if layout.data == "oss" else "",
        layout.cp_kind if layout.cp > 1 else "",
        f"data={layout.data}" if layout.strategy in ("tensor", "pipeline", "3d") and layout.token_ranks > 1 else "",
        "seq+loss parallel" if layout.sequence_parallel and layout.loss_parallel
        else "seq parallel" if layout.sequence_parallel else "loss parallel" if layout.loss_parallel else "",
        f"offload={layout.offload}" if layout.offload != "none" else "",
        f"offload_params={layout.offload_params}" if layout.offload_params != "none" else "",
    ]  # fmt: skip
    return " ".join(word for word in words if word)


def print_table(
    columns: Mapping[str, str],
    rows: Sequence[Mapping[str, str]],
    right: set[str],
    drop: Sequence[str],
    best: Sequence[int] = (0,),
) -> None:
    """Print rows of text by column: full lines to a file; on a terminal only the columns that fit."""
    if sys.stdout.isatty():
        from dtrain.ui.console import stdout_console
        from dtrain.ui.tables import hidden_columns
        from dtrain.ui.tables import print_table as rich_table

        console, texts = stdout_console(), [dict(r) for r in rows]
        if "more" in hidden_columns(console, dict(columns), texts, drop):
            texts = told_apart(texts)
        rich_table(console, dict(columns), texts, drop, best=best, right=right)
        return
    widths = {key: max(len(heading), *(len(r[key]) for r in rows)) for key, heading in columns.items()}
    for line in (columns, *rows):
        cells = [line[key].rjust(widths[key]) if key in right else line[key].ljust(widths[key]) for key in columns]
        print("  ".join(cells).rstrip())


def told_apart(rows: Sequence[Mapping[str, str]]) -> list[dict[str, str]]:
    """Name what rows differ in beside their strategies, where no other column would show it."""
    counts = Counter(tuple(r[key] for key in LAYOUT) for r in rows)
    return [
        {**r, "strategy": f"{r['strategy']}, {r['more']}"}
        if counts[tuple(r[key] for key in LAYOUT)] > 1 and r["more"] != "-" else dict(r) for r in rows
    ]  # fmt: skip


def print_predictions(predictions: Sequence[Prediction]) -> None:
    rows = [row(p) for p in predictions]
    # drop columns that are empty in every row
    empty = {key for key in HEADINGS if all(r[key] in ("-", "none", "0.0", "0 ms") for r in rows)}
    keep = {"memory", "checkpointing", "step"}
    columns = {key: heading for key, heading in HEADINGS.items() if key not in empty or key in keep}
    if predictions and predictions[0].task.unit == "samples":
        columns = {key: "samples/s" if key == "tokens" else heading for key, heading in columns.items()}
    print_table(columns, rows, NUMBERS, LEAST_NEEDED)


def heading(prediction: Prediction, config: Mapping[str, Any]) -> str:
    """Describe the planned configuration in one line."""
    task, cluster, choices = prediction.task, config["cluster"], config["choices"]
    size = f" ({gib(task.limit / GIB)} usable)" if task.limit else ""
    gpus = f"{world_size(config)} × {task.hardware.gpu or choices['hardware']}{size}"
    if cluster["nodes"] > 1:
        gpus = f"{cluster['nodes']} nodes, {gpus}"
    model = f"{choices['model']}, {si(num_parameters(task.shape))} parameters"
    if rank := (config.get("lora") or {}).get("rank"):
        model += f", LoRA of rank {rank}"
    if host := task.hardware.host_memory_gib:
        gpus += f", {host:,.0f} GiB of host memory a node"
    return " · ".join([model, gpus, choices["precision"], *work(task)])


def work(task: Task) -> tuple[str, str]:
    """Describe the batch, and the length of the run."""
    sample = f" × {task.tokens_per_sample} tokens" if task.tokens_per_sample > 1 else ""
    steps, tokens = task.samples / task.global_batch_size, task.samples * task.tokens_per_sample
    return f"batch {task.global_batch_size}{sample}", f"{si(steps)} steps = {si(tokens)} {task.unit}"


def no_price(prediction: Prediction) -> list[str]:
    """Tell how to get the cost of a run on GPUs without a price."""
    if prediction.cost is not None or not prediction.run_s or not prediction.task.hardware.gpu:
        return []
    return ["for the cost, add the price of a GPU-hour: hardware.price_per_gpu_hour=2.5"]


def bounds(prediction: Prediction) -> list[str]:
    """How long the run may take, and cost: published runs were slower than predicted, hardly ever faster."""
    if not prediction.run_s:
        return []
    percents = f"published runs took up to {round(100 * SLOWER - 100)}% longer than predicted"
    line = f"run     {duration(prediction.run_s)} to {duration(SLOWER * prediction.run_s)}"
    if prediction.cost:
        line += f", cost {money(prediction.cost)} to {money(SLOWER * prediction.cost)}"
    return [f"{line} ({percents})"]


def details(prediction: Prediction) -> list[str]:
    """Return memory and time of one layout with all their parts, in two lines."""

    def parts(values: dict[str, float], text: Any) -> str:
        return " + ".join(f"{part} {text(value)}" for part, value in values.items() if part != "total" and value)

    memory = by_part(prediction.memory)
    lines = [f"memory  {gib(memory['total'] / GIB)} = {parts(memory, lambda v: gib(v / GIB))}"]
    if prediction.task.limit:
        beside = f"{gib(prediction.reserve / GIB)} more for {reserved(prediction)}"
        lines[0] += f"; {beside}; {gib(prediction.task.limit / GIB)} usable"
    if prediction.time is not None:
        time = by_part(prediction.time)
        lines.append(f"step    {step_time(time['total'])} = {parts(time, step_time)}")
    return lines


def reserved(prediction: Prediction) -> str:
    """Name what peak.reserve counts."""
    libraries = "CUDA, NCCL" if prediction.task.hardware.gpu else "Python, torch"
    return f"{libraries} and gaps between allocations"


def explained(prediction: Prediction) -> list[str]:
    """Return every value with its arithmetic."""
    each = "GPU" if prediction.task.hardware.gpu else "rank"
    lines = [f"memory of the fullest {each}, GiB:"]
    lines += [explained_item(item, f"{item.value / GIB:9.3f}") for item in prediction.memory]
    beside = f"; plus {gib(prediction.reserve / GIB)} for {reserved(prediction)}" if prediction.task.limit else ""
    lines.append(f"  {prediction.memory_bytes / GIB:9.3f}  in all{beside}")
    if prediction.time is not None:
        lines += ["", f"one step of the slowest {each}, ms:"]
        lines += [explained_item(item, f"{1000 * item.value:9.3f}") for item in prediction.time]
        lines.append(f"  {1000 * (prediction.step_s or 0.0):9.3f}  in all")
        task = prediction.task
        flops = f"{task.flops_per_sample:.4g} FLOP a sample × {task.global_batch_size} samples"
        if prediction.mfu is not None:
            peak = f"({prediction.layout.world_size} GPUs × {task.hardware.peak_bf16_tflops:g} TFLOP/s)"
            lines.append(f"  MFU {percent(prediction.mfu)} = {flops} ÷ {prediction.step_s:.4g} s ÷ {peak}")
        price = task.hardware.price_per_gpu_hour
        hours = f"{prediction.layout.world_size} GPUs × {si(task.samples / task.global_batch_size)} steps"
        lines.append(f"  {si(prediction.gpu_hours)} GPU-hours = {hours} × {prediction.step_s:.4g} s ÷ 3600")
        if prediction.cost is not None:
            lines.append(f"  cost {money(prediction.cost)} = {si(prediction.gpu_hours)} GPU-hours × {price:g}")
    return lines


def explained_item(item: Item, value: str) -> str:
    return f"  {value}  {item.part}, {item.name}" + (f": {item.arithmetic}" if item.formula else "")
