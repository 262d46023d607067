"""Tables of runs: the columns, the order of the runs, and what fits a terminal."""

from __future__ import annotations

import difflib
import math
import shlex
from collections.abc import Collection, Sequence
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dtrain.runs.metrics import larger_is_better
from dtrain.runs.record import ERRORS, RESULTS
from dtrain.ui.console import say, stdout_console
from dtrain.util.format import clean, duration, gib, loss_text, number, percent, short_path, si

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

OWN_METRICS, MOST_OWN = "own_metrics", 8  # of a row: the user's own metrics; how many of them a table has
LARGE_IS_GOOD = ("tokens_per_s", "mfu", "steps", "total_steps", "world_size", "started")


def signed(error: object) -> str:
    """Format a prediction's error: +3.1% means that too much time or memory was predicted."""
    n = number(error)
    return "-" if n is None else f"{100 * n:+.1f}%"


# Heading and format of each key of a run, in table order.
COLUMNS: dict[str, tuple[str, Any]] = {
    "path": ("run", lambda path: short_path(Path(path))),
    "name": ("name", str),
    "status": ("status", str),
    "job_id": ("job", str),
    "model": ("model", str),
    "strategy": ("strategy", str),
    "precision": ("precision", str),
    "world_size": ("ranks", str),
    "steps": ("steps", str),
    "total_steps": ("total steps", str),
    "train_loss": ("train loss", loss_text),
    "val_loss": ("val loss", loss_text),
    "val_accuracy": ("accuracy", percent),
    "tokens_per_s": ("tok/s", si),
    "mfu": ("MFU", percent),
    "peak_mem_gib": ("memory", gib),
    "wall_s": ("wall", duration),
    "step_error": ("time error", signed),
    "memory_error": ("memory error", signed),
    "tags": ("tags", " ".join),
    "forked_from": ("forked from", lambda text: short_path(Path(text))),
    "started": ("started", lambda text: datetime.fromisoformat(text).astimezone().strftime("%Y-%m-%d %H:%M")),
}
DEFAULT_COLUMNS = tuple(key for key in COLUMNS if key not in ("name", "total_steps", "started", "forked_from"))
# Columns that a narrow terminal drops first.
LEAST_NEEDED = (
    "tags",
    "precision", "wall_s", "memory_error", "peak_mem_gib", "step_error", "world_size", "mfu", "model", "tokens_per_s",
    "job_id",
)  # fmt: skip
STYLES = {
    "done": "green",
    "failed": "red",
    "died": "red",
    "preempted": "yellow",
    "cancelled": "yellow",
    "queued": "dim",
    "paused": "dim",
    "replaced": "dim",
}


def own_columns(runs: Sequence[dict[str, Any]]) -> list[str]:
    """Return the names of the users' own metrics that these runs have."""
    return list(dict.fromkeys(name for run in runs for name in run.get(OWN_METRICS, {})))[:MOST_OWN]


def own_cells(run: dict[str, Any], names: Sequence[str]) -> dict[str, str]:
    values = run.get(OWN_METRICS, {})
    return {name: f"{values[name]:.6g}" if name in values else "-" for name in names}


def sort_runs(runs: list[dict[str, Any]], key: str) -> list[dict[str, Any]]:
    """Sort best first: small losses, large speeds, new runs; unknown values last."""
    own = own_columns(runs)
    key = column(key, own)

    def value(run: dict[str, Any]) -> float | str | None:
        if key in own:
            return run.get(OWN_METRICS, {}).get(key)
        n = number(run.get(key))
        if key in ERRORS and n is not None:
            n = abs(n)  # the best is the closest to 0, on either side
        if key in (*RESULTS, *ERRORS) or key in ("world_size", "steps", "total_steps"):
            return None if n is None or math.isnan(n) else n
        return None if run.get(key) is None else str(run[key])

    large_first = larger_is_better(key) is True if key in own else key in LARGE_IS_GOOD
    known = [(value(run), i) for i, run in enumerate(runs) if value(run) is not None]
    order = [i for _, i in sorted(known, key=lambda pair: pair[0], reverse=large_first)]  # type: ignore
    return [runs[i] for i in order] + [run for run in runs if value(run) is None]


def column(name: str, own: Sequence[str]) -> str:
    """Return the key of a column, from the key or the heading of the table: val_loss, `val loss`, tok/s."""
    names = {heading.lower(): key for key, (heading, _) in COLUMNS.items()} | {key: key for key in (*COLUMNS, *own)}
    for typed in (name, name.lower(), name.lower().replace("_", " ")):
        if typed in names:
            return names[typed]
    near = difflib.get_close_matches(name.lower(), names, n=1, cutoff=0.4)
    hint = f"did you mean {shlex.quote(near[0])}? " if near else ""
    known = ", ".join(dict.fromkeys([*(heading for heading, _ in COLUMNS.values()), *own]))
    raise ValueError(f"--sort={name}: no column has this name\n  fix: {hint}--sort takes a heading: {known}")


def cell(key: str, value: Any) -> str:
    """Format a value; a metric of the user's own has no column, and is a number."""
    return "-" if value is None else clean(COLUMNS[key][1](value)) if key in COLUMNS else f"{value:.6g}"


def print_table(
    console: Console,
    columns: dict[str, str],
    rows: list[dict[str, str]],
    droppable: Sequence[str] = (),
    best: Sequence[int] = (),
    right: Collection[str] = (),
) -> None:
    """Print rows of text by column. A terminal hides droppable columns that do not fit; a file gets full lines.

    right: columns that are aligned to the right, besides the numbers of runs.
    """
    if not console.is_terminal:
        wide = _endless()
        with wide.capture() as text:
            wide.print(_table(columns, rows, best, right))
        for line in text.get().splitlines():
            say(console, line.rstrip())
        return
    hidden = hidden_columns(console, columns, rows, droppable)
    kept = {key: heading for key, heading in columns.items() if key not in hidden}
    gap = 2 if _width(kept, rows) <= console.width else 1
    console.print(_table(kept, rows, best, right, gap), highlight=False)
    if hidden:
        headings = ", ".join(columns[key] for key in hidden)
        say(console, (f"hidden to fit {console.width} columns: {headings}", "dim"))


def hidden_columns(
    console: Console, columns: dict[str, str], rows: list[dict[str, str]], droppable: Sequence[str]
) -> list[str]:
    """Return the columns that a terminal has no room for: the first of `droppable`, as many as needed."""
    hidden: list[str] = []

    def fits(without: Collection[str]) -> bool:
        return _width({k: v for k, v in columns.items() if k not in without}, rows) <= console.width

    for key in droppable:
        if fits(hidden):
            break
        hidden += [key] if key in columns else []
    for key in reversed(hidden):  # a wide column may leave room for narrow ones that went before it
        others = [other for other in hidden if other != key]
        hidden = others if fits(others) else hidden
    return hidden


def _endless() -> Console:
    from rich.console import Console

    return Console(width=100_000, color_system=None, force_terminal=False)


def _width(columns: dict[str, str], rows: list[dict[str, str]]) -> int:
    return _endless().measure(_table(columns, rows)).maximum


def _table(
    columns: dict[str, str],
    rows: list[dict[str, str]],
    best: Sequence[int] = (),
    right: Collection[str] = (),
    gap: int = 2,
) -> Table:
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False, padding=(0, gap, 0, 0), header_style="bold")
    for key, heading in columns.items():
        numeric = key in right or (
            key in COLUMNS and COLUMNS[key][1] in (loss_text, si, percent, gib, duration, signed)
        )
        table.add_column(Text(heading), justify="right" if numeric else "left", overflow="fold")
    for i, row in enumerate(rows):
        cells = [Text(row[key], style=_style(row[key]) if key == "status" else "") for key in columns]
        table.add_row(*cells, style="bold green" if i in best else "")
    return table


def _style(status: str) -> str:
    return STYLES.get(status, "cyan")


def print_runs(
    runs: list[dict[str, Any]],
    console: Console | None = None,
    sort: str | None = None,
    columns: Sequence[str] = DEFAULT_COLUMNS,
) -> None:
    """Print one line per run. sort: a key of COLUMNS, best first; otherwise in the given order."""
    console = console or stdout_console()
    sort = column(sort, own_columns(runs)) if sort else None
    runs = sort_runs(runs, sort) if sort else runs
    # Drop columns that no run fills (MFU on CPUs) or that were not requested; keep the sorted one.
    keys = [k for k in COLUMNS if (k in columns or k == sort) and any(run.get(k) is not None for run in runs)]
    if not runs:
        say(console, "no runs here yet: start one with `dtrain launch`")
        return
    own = own_columns(runs)
    rows = [{key: cell(key, run.get(key)) for key in keys} | own_cells(run, own) for run in runs]
    for run, row in zip(runs, rows, strict=True):
        if "steps" in row:
            row["steps"] = steps_text(run)
    columns_of = {key: COLUMNS[key][0] for key in keys} | {name: name for name in own}
    print_table(console, columns_of, rows, [k for k in (*reversed(own), *LEAST_NEEDED) if k != sort])


def steps_text(run: dict[str, Any]) -> str:
    total = run.get("total_steps")
    return cell("steps", run["steps"]) + (f"/{total}" if run["steps"] is not None and total is not None else "")


def say_problem(problem: str, console: Console) -> None:
    """Report that SLURM did not answer, so that the statuses come from the files only."""
    if problem:
        say(console, (f"SLURM did not answer, so this is from the run folders only: {problem}", "yellow"))
