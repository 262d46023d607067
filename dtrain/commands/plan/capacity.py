"""Capacity questions beside the plan: how many GPUs, how large a model, how large a micro-batch."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from dtrain.commands.plan.request import SLURM_GPUS, Question, launch_command
from dtrain.config.files import options_of
from dtrain.config.hardware import world_size
from dtrain.plan.layout import Layout
from dtrain.plan.memory.activations import GIB
from dtrain.plan.model_shape import Transformer
from dtrain.plan.parameters import num_parameters
from dtrain.plan.predict import Prediction, Task, predict_layout, task_of, with_time
from dtrain.plan.report import SLOWER, money, no_price, print_table, step_time, work
from dtrain.plan.search.explain_choice import gpus, label, name, tight_note
from dtrain.plan.search.search import CHECKPOINTING, candidates, rank, search
from dtrain.plan.sections import model_section
from dtrain.util.format import duration, gib, percent, si, without_nan

MOST_NODES = 4096
NOTHING_FITS = "nothing fits"
LEAST_NEEDED = ("mfu", "nodes", "tokens_per_s", "memory_gib", "gpu_hours")  # columns that a narrow terminal drops first
STEPS = 12  # bisection steps for the largest scaled model: 0.1% of its size


@dataclass
class Answer:
    """A sentence, and the table rows behind it."""

    question: str
    sentence: str
    value: Any
    rows: list[dict[str, Any]]
    columns: dict[str, Any]  # key → (heading, format)
    command: str | None = None  # the command to launch it, if the answer is a layout
    notes: list[str] = field(default_factory=list)

    @property
    def best(self) -> list[int]:
        """The row that the answer is about."""
        keys = ("gpus", "parameters", "micro_batch_size")
        return [i for i, row in enumerate(self.rows) if self.value in [row.get(key) for key in keys]][:1]


def show(answer: Answer, as_json: bool) -> None:
    if as_json:
        content = {"question": answer.question, "answer": answer.value, "sentence": answer.sentence}
        content |= {"command": answer.command} if answer.command else {}
        content |= {"notes": answer.notes} if answer.notes else {}
        print(json.dumps(without_nan(content | {"rows": answer.rows}), indent=1))
        return
    print(answer.sentence)
    if answer.rows:
        print()
        columns = {k: v for k, v in answer.columns.items() if any(row.get(k) is not None for row in answer.rows)}
        texts = [
            {key: "-" if row.get(key) is None else form(row[key]) for key, (_, form) in columns.items()}
            for row in answer.rows
        ]
        headings = {key: heading for key, (heading, _) in columns.items()}
        right = {key for key, (_, form) in columns.items() if form is not str}
        print_table(headings, texts, right, LEAST_NEEDED, answer.best)
    if answer.notes:
        print()
    for note in answer.notes:
        print(f"note    {note}")
    if answer.command:
        print(f"\nlaunch  {answer.command}")


# ---- how many GPUs -------------------------------------------------------------------------------------------


def gpus_for(question: Question, limit_s: float, tokens: float | None, everything: bool = False) -> Answer:
    """Find the fewest GPUs that finish the run in time: parts of a node first, then whole nodes, in growing steps.

    everything: also numbers that cannot be enough, to explain why none is.
    """
    rows: list[dict[str, Any]] = []
    task = task_of(question.config, tokens)
    notes = [length(task, tokens)] if task else []
    notes += not_kept(question)
    slower = 0
    before = float("inf")
    batch = question.config["train"]["global_batch_size"]
    columns = {
        "gpus": ("GPUs", str), "nodes": ("nodes", str), "layout": ("best layout", str), "step_s": ("step", step_time),
        "run_s": ("time", duration), "gpu_hours": ("GPU-hours", si), "cost": ("cost", money), "mfu": ("MFU", percent),
    }  # fmt: skip
    fewest = 0.0 if everything else least_ranks(task, limit_s)
    for nodes, ranks in (size for size in cluster_sizes(question.config) if size[0] * size[1] >= fewest):
        sized = with_ranks(question, nodes, ranks)
        found, lacks = layouts_of(sized, tokens)
        best = found[0] if found else None
        rows.append({"gpus": nodes * ranks, "nodes": nodes, **summary(best, lacks)})
        if best is None or best.run_s is None:
            slower += nodes * ranks > batch
        else:
            if best.run_s <= limit_s:
                text = (
                    f"{gpus(nodes * ranks)} {'finishes' if nodes * ranks == 1 else 'finish'} in {duration(best.run_s)}"
                )
                text += f", with {name(best.layout)}"
                if SLOWER * best.run_s > limit_s:
                    text += f", or in {duration(SLOWER * best.run_s)} if the plan is as far off as for published runs"
                text += f". That is {si(best.gpu_hours)} GPU-hours"
                text += f", at a cost of {money(best.cost)}." if best.cost else "."
                notes += [*tight_note(found), *no_price(best)]
                return Answer("gpus_for", text, nodes * ranks, rows, columns, launch_command(sized, best), notes)
            slower = slower + 1 if best.run_s > 0.95 * before else 0
            before = min(before, best.run_s)
        if slower >= 2:  # more GPUs do not help: the batch cannot be divided further
            break
    if fewest > 1:
        return gpus_for(question, limit_s, tokens, everything=True)
    return Answer("gpus_for", too_slow(rows, limit_s, batch), None, rows, columns, notes=notes)


def not_kept(question: Question) -> list[str]:
    """Tell what becomes of a typed number of ranks or nodes: both are what is asked for."""
    notes, cluster = [], question.config["cluster"]
    if "cluster.processes" in question.typed:
        node = f"cluster.processes={cluster['processes']} is taken as the GPUs of a node"
        notes.append(f"{node}: --gpus-for tries parts of a node, then more nodes")
    if "cluster.nodes" in question.typed:
        notes.append(f"cluster.nodes={cluster['nodes']} is not used: --gpus-for finds the number of nodes")
    return notes


def length(task: Task, tokens: float | None) -> str:
    """Describe the run that the GPUs are for."""
    source = "by train.steps; for another length: --tokens 300B" if tokens is None else "by --tokens"
    return f"the run: {', '.join(work(task))}, {source}"


def least_ranks(task: Task | None, limit_s: float) -> float:
    """GPUs below which no layout can be fast enough: even twice the data sheet's rate would not do.

    Twice, because the FLOPs of causal attention are counted in full, and half of them are skipped.
    """
    peak = task.hardware.peak_bf16_tflops if task else None
    return task.samples * task.flops_per_sample / (2 * peak * 1e12 * limit_s) if task and peak else 0.0


def too_slow(rows: list[dict[str, Any]], limit_s: float, batch: int) -> str:
    """Explain why no number of GPUs is enough."""
    timed = [row for row in rows if row.get("run_s")]
    if timed:
        fastest = min(timed, key=lambda row: row["run_s"])
        takes = "takes" if fastest["gpus"] == 1 else "take"
        text = f"Not possible in {duration(limit_s)}: {gpus(fastest['gpus'])} {takes} {duration(fastest['run_s'])}"
        shared = rows[-1]["run_s"] or rows[-1]["layout"] == NOTHING_FITS
        more = "more GPUs do not help with" if shared else "more GPUs cannot share"
        return f"{text}, and {more} train.global_batch_size={batch}; a larger batch can use more GPUs."
    tried = f"up to {rows[-1]['gpus']} GPUs were tried with train.global_batch_size={batch}"
    if any(row["layout"] == NOTHING_FITS for row in rows):
        return f"The model fits on none of these: {tried}."
    return f"No layout can divide the batch: {tried}. A multiple of 8 can be divided over more ranks."


def cluster_sizes(config: Mapping[str, Any]) -> list[tuple[int, int]]:
    """(nodes, ranks per node): 1, 2, 4 … GPUs of one node, then 1, 2, 3, 4, 6, 8, 12 … nodes."""
    node = int(config["cluster"]["processes"])
    sizes = [(1, ranks) for ranks in (1, 2, 4, 8) if ranks < node and node % ranks == 0]
    nodes = sorted({1, *(m * 2**k for k in range(13) for m in (2, 3) if m * 2**k <= MOST_NODES)})
    return sizes + [(count, node) for count in nodes]


def with_ranks(question: Question, nodes: int, ranks: int) -> Question:
    """Return the same question for a cluster of this size, with the overrides that launch it there."""
    cluster, choices = question.config["cluster"], question.config["choices"]
    config = {**question.config, "cluster": {**cluster, "nodes": nodes, "processes": ranks}}
    overrides = [o for o in question.overrides if o.partition("=")[0] not in ("cluster.nodes", "cluster.processes")]
    if choices["cluster"] != "local":
        overrides += [f"cluster.nodes={nodes}"] if nodes != 1 or "cluster.nodes" in question.typed else []
        overrides += [f"cluster.processes={ranks}"] if ranks != cluster.get("gpus_per_node") else []
    elif nodes == 1:
        overrides.append(f"cluster.processes={ranks}")
    else:
        overrides = [word for word in overrides if word != "cluster=local"]
        overrides += [] if "hardware" in question.typed else [f"hardware={choices['hardware']}"]
        overrides += ["cluster=slurm", f"cluster.nodes={nodes}"]
        overrides += [f"cluster.gpus_per_node={ranks}"] if ranks != SLURM_GPUS else []
    return replace(question, config=config, overrides=overrides)


def layouts_of(question: Question, tokens: float | None) -> tuple[list[Prediction], str]:
    """Return the layouts that fit and can be the best, the best first; or none, and the reason."""
    config = question.config
    found = search(config, question.typed, task_of(config, tokens), time_unfit=False, only_best=True)
    batch = config["train"]["global_batch_size"]
    return [
        p for p in found if p.fits is not False
    ], NOTHING_FITS if found else f"no layout can divide a batch of {batch}"


def summary(prediction: Prediction | None, lacks: str = NOTHING_FITS) -> dict[str, Any]:
    if prediction is None:
        return {"layout": lacks, "step_s": None, "run_s": None, "gpu_hours": None, "cost": None, "mfu": None}
    return {
        "layout": label(prediction),
        "step_s": prediction.step_s,
        "run_s": prediction.run_s,
        "gpu_hours": prediction.gpu_hours,
        "cost": prediction.cost,
        "mfu": prediction.mfu,
    }


# ---- how large a model ---------------------------------------------------------------------------------------


def largest_model(question: Question) -> Answer:
    """Find the largest model of conf/model with the same class that fits, and the largest scaling of the named one."""
    config, rows = question.config, []
    for option in options_of("model"):
        section = model_section(option)
        if section.get("_target_") != config["model"]["_target_"]:
            continue
        rows.append(model_row(question, option, section))
    if isinstance(getattr(task_of(config), "shape", None), Transformer) and (scaled := largest_scaled(question)):
        rows.append(scaled)
    rows.sort(key=lambda row: row["parameters"])
    fitting = [row for row in rows if row["fits"]]
    columns = {
        "model": ("model", str), "parameters": ("parameters", si), "fits": ("fits", lambda v: "yes" if v else "no"),
        "seq_len": ("tokens a sample", str), "layout": ("best layout", str), "memory_gib": ("memory", gib),
        "step_s": ("step", step_time), "tokens_per_s": (speed_of(task_of(config)), si), "mfu": ("MFU", percent),
    }  # fmt: skip
    if len({row["seq_len"] for row in rows}) == 1:
        del columns["seq_len"]
    here = gpus(world_size(config))
    if not fitting:
        return Answer("largest_model", f"No model of this family fits on {here}.", None, rows, columns)
    best = fitting[-1]
    named = [row for row in fitting if row["model"] in options_of("model")]
    text = f"{si(best['parameters'])} parameters fit on {here}: {best['model']}, with {best['layout']}."
    if named and named[-1] is not best:
        text += f" The largest of those in conf/model is {named[-1]['model']}."
    return Answer("largest_model", text, best["parameters"], rows, columns)


def speed_of(task: Task | None) -> str:
    """Return the heading of the throughput column."""
    return "samples/s" if task and task.unit == "samples" else "tok/s"


def model_row(question: Question, label: str, section: Mapping[str, Any]) -> dict[str, Any]:
    """Return a row: whether the model fits, and how fast it is."""
    lengths = {k: question.config["model"][k] for k in ("seq_len",) if f"model.{k}" in question.typed}
    model = {**section, **lengths}
    data = dict(question.config["data"])
    if data.get("seq_len") and model.get("seq_len"):
        data["seq_len"] = (
            min(model["seq_len"], data["seq_len"]) if "data.seq_len" in question.typed else model["seq_len"]
        )
    config = {**question.config, "model": model, "data": data}
    task = task_of(config)
    assert task is not None
    fitting = [p for p in candidates(config, question.typed, task) if p.fits]
    row = {"model": label, "parameters": num_parameters(task.shape), "fits": bool(fitting)}
    row["seq_len"] = getattr(task.shape, "seq_len", None) if task.unit == "tokens" else None
    best = rank([with_time(p) for p in fitting])[0] if fitting else None
    row |= {k: v for k, v in summary(best).items() if k in ("layout", "step_s", "mfu")}
    return row | {
        "memory_gib": best and best.memory_bytes / GIB,
        "tokens_per_s": best and best.tokens_per_s,
        "sizes": {k: model[k] for k in ("num_layers", "dim", "num_heads") if k in model},
    }


def largest_scaled(question: Question) -> dict[str, Any] | None:
    """Scale the named model, layers and width alike, to the largest size that fits."""
    low, high = 0.05, 64.0  # scale of layers and width
    best = None
    for _ in range(STEPS):
        middle = (low * high) ** 0.5
        section = scaled_model(question.config["model"], middle)
        config = {**question.config, "model": section}
        if any(p.fits for p in candidates(config, question.typed)):
            low, best = middle, section
        else:
            high = middle
    if best is None:
        return None
    return model_row(question, f"{best['num_layers']} layers of dim {best['dim']}", best)


def scaled_model(model: Mapping[str, Any], factor: float) -> dict[str, Any]:
    """Scale the layers and the width by `factor`; heads keep their size, so their number grows."""
    head = model["dim"] // model["num_heads"]
    groups = model["num_heads"] // (model.get("num_kv_heads") or model["num_heads"])
    unit = 8 if model["num_heads"] * factor >= 16 else 1  # heads that 8 tensor-parallel ranks can share
    heads = max(unit, round(model["num_heads"] * factor / unit) * unit)
    heads = max(groups, heads // groups * groups)
    scaled = {
        **model,
        "num_layers": max(1, round(model["num_layers"] * factor)),
        "num_heads": heads,
        "dim": heads * head,
    }
    if "num_kv_heads" in model:
        scaled["num_kv_heads"] = heads // groups
    if model.get("hidden_dim"):
        scaled["hidden_dim"] = max(64, round(model["hidden_dim"] / model["dim"] * heads * head / 64) * 64)
    return scaled


# ---- how large a micro-batch ---------------------------------------------------------------------------------


def largest_micro_batch(question: Question, task: Task) -> Answer:
    """Find the largest micro-batch for the best layout of each strategy, with each kind of activation checkpointing."""
    rows: list[dict[str, Any]] = []
    typed = {*question.typed} - {"train.micro_batch_size"}
    modes = (question.config["activation_checkpointing"],) if "activation_checkpointing" in typed else CHECKPOINTING
    firsts: dict[str, Layout] = {}
    for prediction in search(question.config, typed, task, time_unfit=False):
        firsts.setdefault(prediction.layout.strategy, prediction.layout)
    for layout in firsts.values():
        for mode in modes:
            if mode == "ops" and layout.schedule == "zbv":
                continue
            size = most_samples(replace(layout, activation_checkpointing=mode), task)
            if size:
                best = with_time(at_size(replace(layout, activation_checkpointing=mode), size, task))
                rows.append(
                    {
                        "strategy": layout.strategy, "layout": name(layout), "activation_checkpointing": mode,
                        "micro_batch_size": size, "memory_gib": best.memory_bytes / GIB,
                        "tokens_per_s": best.tokens_per_s, "mfu": best.mfu,
                    }
                )  # fmt: skip
    columns = {
        "layout": ("layout", str), "activation_checkpointing": ("checkpoint", str),
        "micro_batch_size": ("micro-batch", lambda v: str(v)), "memory_gib": ("memory", gib),
        "tokens_per_s": (speed_of(task), si), "mfu": ("MFU", percent),
    }  # fmt: skip
    if not rows:
        text = "Not even one sample per pass fits under any layout of these GPUs."
        return Answer("largest_micro_batch", text, None, rows, columns)
    best_row = max(rows, key=lambda row: row["micro_batch_size"])
    fastest = max(rows, key=lambda row: row["tokens_per_s"] or 0.0)
    text = f"{best_row['micro_batch_size']} samples per pass fit with {best_row['layout']}"
    text += f" and activation_checkpointing={best_row['activation_checkpointing']}."
    if fastest is not best_row and fastest["tokens_per_s"]:
        text += f" The fastest at its largest micro-batch is {fastest['layout']} with activation_checkpointing="
        text += f"{fastest['activation_checkpointing']}: {fastest['micro_batch_size']} samples."
    return Answer("largest_micro_batch", text, best_row["micro_batch_size"], rows, columns)


def at_size(layout: Layout, size: int, task: Task) -> Prediction:
    """Predict the layout with this micro-batch size and as many micro-batches as its schedule needs."""
    count = 4 * layout.pp if layout.pp > 1 else 1
    layout = replace(layout, micro_batch_size=size, micro_batches=count)
    return predict_layout(layout, replace(task, global_batch_size=layout.global_batch_size), timed=False)


def most_samples(layout: Layout, task: Task) -> int:
    """Return the largest micro-batch that fits; 0: none fits."""
    high = 1
    while at_size(layout, high, task).fits and high < 2**20:
        high *= 2
    low = high // 2
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if at_size(layout, middle, task).fits else (low, middle)
    return low
