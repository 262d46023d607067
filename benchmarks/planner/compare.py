"""The planner's memory beside what was measured on one H200: the error of every row, and by strategy.

    python benchmarks/planner/measure.py --compare

Rows of benchmarks/results/planner-h200.json, and of the files that the launcher's own runs left (throughput, lora and
strategies): those runs say nothing about memory but their peak, and were made for other questions.
"""

from __future__ import annotations

import json
import statistics
from collections import Counter
from pathlib import Path
from typing import Any

import yaml

from dtrain.plan.layout import Layout
from dtrain.plan.ledger import by_part, total
from dtrain.plan.memory.activations import GIB
from dtrain.plan.memory.peak import memory
from dtrain.plan.model_shape import Shape, shape_of

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "benchmarks" / "results"


def shape_for(model: str, overrides: list[str]) -> Shape:
    """The model of conf/model with a row's overrides."""
    settings = yaml.safe_load((ROOT / "conf" / "model" / f"{model}.yaml").read_text())
    settings.pop("defaults", None)
    config: dict[str, Any] = {"model": settings, "data": {}, "lora": {"rank": 0, "targets": []}}
    for word in overrides:
        name, _, value = word.partition("=")
        section, _, key = name.partition(".")
        if section in config:
            config[section][key] = yaml.safe_load(value)
    shape = shape_of(config)
    assert shape is not None
    return shape


def layout_for(row: dict[str, Any]) -> Layout:
    """As the row says; those that say nothing are of the head, stream and optimizer that there were first.

    Then, compiled meant one graph where no messages go between layers; and by block, layers that were computed again
    stayed as they were.
    """
    if "layout" in row:
        return Layout(**row["layout"])
    overrides = dict(word.split("=", 1) for word in row.get("words", []))
    return Layout(
        strategy=row["strategy"],
        tp=row.get("tp", 1),
        pp=row.get("pp", 1),
        dp=row.get("dp", row["world_size"]),
        micro_batch_size=row["micro_batch_size"],
        micro_batches=row.get("micro_batches", 1),
        data=row.get("data") or row["strategy"],
        sequence_parallel=overrides.get("strategy.sequence_parallel") == "true",
        loss_parallel=overrides.get("strategy.loss_parallel") == "true",
        activation_checkpointing=row.get("activation_checkpointing", "none"),
        offload=overrides.get("strategy.offload", "none"),
        offload_params=overrides.get("strategy.offload_params", "none"),
        precision=row.get("precision", "bf16"),
        compile=first_compile(row),
        bucket_mb=100 if row["strategy"].startswith("zero") else 25,
    )


def first_compile(row: dict[str, Any]) -> str:
    if not row.get("compile"):
        return "none"
    if row["strategy"] in ("ddp", "local_sgd", "fairscale"):
        return "whole"
    return "none" if row.get("activation_checkpointing") == "full" else "blocks"


def measured(path: Path) -> list[dict[str, Any]]:
    """The rows of our own file, and those of other benchmarks in its format."""
    rows = list(json.loads(path.read_text())["rows"])
    for row in json.loads((RESULTS / "throughput-h200.json").read_text())["rows"]:
        if row["model"] == "bert-large":
            overrides = ["model.task=classify", "model.num_classes=3", "model.seq_len=128"]
        else:
            overrides = ["model.seq_len=2048"] if row["model"].startswith("llama") else []
        rows.append({
            "model": row["model"], "strategy": row["strategy"], "world_size": 1, "words": overrides,
            "micro_batch_size": row["global_batch_size"], "compile": "compile" in row["row"],
            "activation_checkpointing": "full" if "checkpointing" in row["row"] else "none",
            "peak_gib": row["peak_mem_gib"], "source": "throughput",
        })  # fmt: skip
    for row in json.loads((RESULTS / "lora-h200.json").read_text())["rows"]:
        if row["tool"] == "dtrain" and "peak_mem_gib" in row:
            lora = [f"lora.rank={row['rank']}", f"lora.targets={row['targets']}"]
            overrides = [f"model.seq_len={row['seq_len']}", *lora]
            rows.append({
                "model": row["model"], "strategy": row["strategy"], "world_size": 1, "words": overrides,
                "micro_batch_size": row["batch"], "compile": row.get("compile", False),
                "peak_gib": row["peak_mem_gib"], "source": "lora",
            })  # fmt: skip
    for row in json.loads((RESULTS / "strategies-h200.json").read_text())["rows"]:
        if "mem_gib" in row and (row["world_size"] > 1 or "offloaded" in row["row"]):
            sizes = row["mesh"]
            rows.append({
                "model": "gpt2-1.5b", "strategy": row["strategy"], "world_size": row["world_size"],
                "words": ["model.num_heads=20"] * (row["world_size"] > 1) + offloaded(row["row"]), **sizes,
                "micro_batch_size": 8 // sizes["dp"], "data": "fsdp" if row["strategy"] == "tensor" else None,
                "peak_gib": row["mem_gib"], "source": "strategies",
            })  # fmt: skip
    return rows


def offloaded(name: str) -> list[str]:
    overrides = ["strategy.offload=cpu"] if "offloaded" in name else []
    return overrides + (["strategy.offload_params=cpu"] if "weights offloaded" in name else [])


def errors(path: Path) -> list[tuple[dict[str, Any], float, dict[str, float]]]:
    """(row, relative error, predicted GiB by part) of every row that has a peak and is not set aside."""
    out = []
    for row in measured(path):
        if row.get("peak_gib") and not set_aside(row):
            items = memory(shape_for(row["model"], row.get("words", [])), layout_for(row))
            parts = {part: value / GIB for part, value in by_part(items).items()}
            out.append((row, total(items) / GIB / row["peak_gib"] - 1, parts))
    return out


def set_aside(row: dict[str, Any]) -> str:
    """Why a row is not judged; "" if it is. It was measured, but not of what a run does today: its flag says why."""
    return str(row.get("aside") or row.get("superseded") or "")


def name_of(row: dict[str, Any]) -> str:
    overrides = [w for w in row.get("words", []) if not w.startswith("model.seq_len")]
    extra = [row.get("activation_checkpointing", "none")] + ["compile"] * compiled(row) + ["fast"] * ("layout" in row)
    extra += [p for p in [row.get("precision", "bf16")] if p != "bf16"] + overrides
    passes = f"×{row['micro_batches']}" if row.get("micro_batches", 1) > 1 else ""
    return (
        f"{row['model']} {row['strategy']} on {row['world_size']}, {row['micro_batch_size']}{passes}, {' '.join(extra)}"
    )


def compiled(row: dict[str, Any]) -> bool:
    return row["layout"]["compile"] != "none" if "layout" in row else bool(row.get("compile"))


def show(path: Path) -> None:
    """Every judged row with its error, then the errors by strategy, and how many rows are set aside."""
    rows = errors(path)
    for row, error, parts in rows:
        columns = " ".join(f"{part[:5]} {value:.2f}" for part, value in parts.items() if part != "total")
        mark = " <" if abs(error) > 0.08 else ""
        print(f"{name_of(row)[:74]:74} {row['peak_gib']:7.2f} {parts['total']:7.2f} {error:+7.1%}{mark}   {columns}")
    print()
    groups: dict[str, list[float]] = {}
    for row, error, _ in rows:
        kinds = ("compiled" if compiled(row) else "eager", "fast" if "layout" in row else "first", "all")
        for name in (row["strategy"], *kinds):
            groups.setdefault(name, []).append(error)
    print(f"{'':12} {'rows':>5} {'mean':>7} {'median':>7} {'worst':>7} {'bias':>7}")
    for name, values in groups.items():
        sizes = [abs(v) for v in values]
        figures = (statistics.mean(sizes), statistics.median(sizes), max(sizes), statistics.mean(values))
        print(f"{name:12} {len(values):5} " + " ".join(f"{figure:7.1%}" for figure in figures))
    aside = Counter(why for row in measured(path) if (why := set_aside(row)))
    print(f"\nset aside, neither judged nor counted: {aside.total()} rows")
    for why, count in aside.items():
        print(f"  {count} {why}")
