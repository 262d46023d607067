"""`dtrain report --format png|svg`: loss, validation, speed and memory of runs as one picture, by matplotlib."""

from __future__ import annotations

import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from dtrain.config.redaction import hide
from dtrain.errors import bad
from dtrain.report.curves import columns, curve
from dtrain.report.page import name_apart, replace
from dtrain.report.run_data import plan_values, safe_text
from dtrain.runs.folder import read_json
from dtrain.runs.metrics import rows
from dtrain.runs.record import Record
from dtrain.util.format import si

# metric: heading, key of the plan
PANELS = {
    "loss": ("loss", None),
    "val_loss": ("validation loss", None),
    "tokens_per_s": ("tokens/s", "tokens_per_s"),
    "mem_gib": ("peak memory of a rank, GiB", "memory_gib"),
}
MOST_POINTS = 700  # a panel has about as many pixels
NAMED = 10  # a legend of more runs hides the curves


def draw(run_dirs: Sequence[Path], file: Path, title: str, kind: str) -> int:
    """Write the picture; return its size in bytes."""
    try:
        from matplotlib import rcParams
        from matplotlib.figure import Figure
    except ImportError:
        rule = "matplotlib is not installed"
        raise bad("--format", kind, rule, "pip install 'dtrain[notebook]', or --format html") from None

    records = [Record.read(Path(d)) for d in run_dirs]
    names = [{"name": hide(safe_text(record.row()["name"]))} for record in records]
    name_apart(names, run_dirs)
    found = [columns(rows(record.run_dir / "metrics.jsonl")) for record in records]
    plans = [plan_values(record.run_dir, read_json(record.run_dir / "plan.json")) for record in records]
    rcParams["svg.hashsalt"] = "dtrain"  # the same runs give the same bytes
    figure = Figure(figsize=(11, 6.4), layout="constrained")
    figure.suptitle(without_formula(hide(title)), fontsize=11)
    cycle = len(records) <= NAMED
    for place, (metric, (heading, planned)) in enumerate(PANELS.items(), 1):
        axes = figure.add_subplot(2, 2, place)
        for i, (known, plan, name) in enumerate(zip(found, plans, names, strict=True)):
            if metric not in known:
                continue
            color: Any = f"C{i}" if cycle else (0.12, 0.35 + 0.4 * i / len(records), 0.7)
            add_curve(
                axes, curve(*known[metric], MOST_POINTS), color, without_formula(name["name"]), 1.2 if cycle else 0.7
            )
            if planned and planned in plan and (cycle or i == 0):
                axes.axhline(plan[planned], color=color if len(records) > 1 else "gray", linestyle="--", linewidth=0.9)
        axes.set_title(heading, fontsize=10, loc="left")
        axes.set_xlabel("step", fontsize=8)
        axes.tick_params(labelsize=8)
        axes.grid(alpha=0.25)
        axes.spines[["top", "right"]].set_visible(False)
        if metric == "tokens_per_s":
            axes.yaxis.set_major_formatter(lambda value, _: si(value))
        if not axes.lines:
            axes.text(0.5, 0.5, "no values", ha="center", va="center", transform=axes.transAxes, color="gray")
        elif place == 1 and 1 < len(records) <= NAMED:
            axes.legend(fontsize=7, frameon=False)
    out = io.BytesIO()
    figure.savefig(out, format=kind, dpi=120, metadata={"Date": None} if kind == "svg" else None)
    replace(file, out.getvalue())
    return len(out.getvalue())


def add_curve(axes: Any, found: dict[str, Any], color: Any, name: str, width: float) -> None:
    xs, place = [], 0.0
    for step in found["x"]:
        place += step
        xs.append(place)
    marker = "o" if len(xs) <= 30 else None
    axes.plot(xs, found["y"], color=color, linewidth=width, label=name, marker=marker, markersize=3)
    if "lo" in found:
        axes.fill_between(xs, found["lo"], found["hi"], color=color, alpha=0.2, linewidth=0)


def without_formula(name: str) -> str:
    """A text from a run folder is no formula: matplotlib reads what stands between two dollar signs."""
    return name.replace("$", r"\$")[:120]
