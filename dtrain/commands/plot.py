"""`dtrain plot RUN... [METRIC...]`: draw curves of runs in the terminal."""

from __future__ import annotations

import argparse
import difflib
import shutil
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

from dtrain.commands.report import find_runs
from dtrain.commands.run_parser import RunParser
from dtrain.config.redaction import hide
from dtrain.report.curves import Column, columns
from dtrain.report.page import name_apart
from dtrain.report.run_data import FIRST, safe_text
from dtrain.runs.metrics import NO_CURVE, rows
from dtrain.runs.record import Record
from dtrain.ui.console import say, stdout_console
from dtrain.ui.curve import STYLES, Series, curve
from dtrain.util.format import clean

HEIGHT, WIDTH = 16, 80  # of a curve in a pipe
NARROWEST = 20


def main(argv: list[str]) -> int:
    """Draw one picture for each metric, with one line for each run."""
    parser = RunParser("dtrain plot", description="Draw curves of runs in the terminal.")
    parser.add_argument(
        "words",
        nargs="+",
        metavar="RUN",
        help="a run folder, a part of its name, latest, or a folder of runs (a sweep)",
    )
    parser.add_argument(
        "metrics", nargs="*", metavar="METRIC", help="after the runs: loss (default), val_loss, lr, tokens_per_s, ..."
    )
    parser.add_argument("--log", action="store_true", help="logarithmic y axis")
    parser.add_argument("--height", type=int, help="lines of a picture (default: by the terminal)")
    parser.add_argument("--width", type=int, help="columns (default: the terminal's)")
    options = parser.parse_args(argv)
    known, metrics = split([*options.words, *options.metrics])
    there = metric_names(known.values())
    if not there:
        fix = "wait for the first step: dtrain logs latest -f"
        raise ValueError(f"{' '.join(options.words)}: there are no metrics yet\n  fix: {fix}")
    run_dirs = list(known)
    labels = [{"name": hide(safe_text(Record.read(run_dir).row()["name"]))} for run_dir in run_dirs]
    name_apart(labels, run_dirs)
    draw(
        [label["name"] for label in labels],
        list(known.values()),
        metrics or ["loss" if "loss" in there else there[0]],
        options,
    )
    return 0


def split(words: Sequence[str]) -> tuple[dict[Path, dict[str, Column]], list[str]]:
    """(metrics of each run folder, names of metrics to draw). A word is a metric if a run named before it has that."""
    known: dict[Path, dict[str, Column]] = {}
    metrics: list[str] = []
    for word in words:
        there = metric_names(known.values())
        if word in there and not Path(word).is_dir():
            metrics.append(word)
            continue
        try:
            found = find_runs([word])
        except ValueError as error:
            if not there or "/" in word or "runs have that" in str(error):
                raise
            near = difflib.get_close_matches(word, there, 1)
            hint = f"did you mean {near[0]}? " if near else ""
            names = ", ".join(map(clean, there))
            raise ValueError(f"{word}: neither a metric nor a run\n  fix: {hint}the metrics are {names}") from None
        known |= {run: columns(rows(run / "metrics.jsonl")) for run in found if run not in known}
    return known, list(dict.fromkeys(metrics))


def metric_names(of_runs: Iterable[dict[str, Column]]) -> list[str]:
    """Every metric of the runs, the well-known ones first."""
    names = dict.fromkeys(name for of in of_runs for name in of)
    return [name for name in dict.fromkeys((*FIRST, *names)) if name in names and name not in NO_CURVE]


def draw(names: list[str], known: list[dict[str, Column]], metrics: list[str], options: argparse.Namespace) -> None:
    console = stdout_console()
    size = shutil.get_terminal_size((WIDTH, 24)) if sys.stdout.isatty() else None
    width = max(NARROWEST, options.width or (size.columns if size else WIDTH))
    height = options.height or (max(8, min(24, (size.lines - 4) // len(metrics))) if size else HEIGHT)
    for metric in metrics:
        series: list[Series] = [(name, *of[metric]) for name, of in zip(names, known, strict=True) if metric in of]
        last = f"  {series[0][2][-1]:.5g}" if len(series) == 1 else ""
        say(console, (metric, "bold"), (f"  {series[0][0]}" if len(series) == 1 else "", "dim"), last)
        for line in curve(series, width, height, log=options.log):
            console.print(line, soft_wrap=True, highlight=False)
        if len(series) > len(STYLES):
            say(console, (f"{len(series)} runs share {len(STYLES)} colours: dtrain report draws them apart", "dim"))
