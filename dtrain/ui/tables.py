"""Tables of runs: list them, compare them, and one line per point of a sweep."""

from __future__ import annotations

import difflib
import json
import math
import os
import re
import shlex
from collections.abc import Collection, Sequence
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dtrain.runs.causes import one_line
from dtrain.runs.folder import read_json
from dtrain.runs.metrics import larger_is_better
from dtrain.runs.record import ERRORS, RESULTS, load
from dtrain.runs.search_journal import JOURNAL
from dtrain.ui.console import say, stdout_console
from dtrain.util.format import as_dict, clean, duration, gib, loss_text, number, percent, shell_path, short_path, si

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

OWN_METRICS, MOST_OWN = "own_metrics", 8  # of a row: the user's own metrics; how many of them a table has
SWEEP = "sweep.json"  # in the folder of a sweep: its command and its points
MOST_WAITING = 10  # points of a sweep that are listed though they have not begun
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
# of a comparison: what every run has anew, or what others say; model and so on are among the settings, if they differ
NOT_COMPARED = {"_target_", "_partial_", "name", "resume", "resume_allow", "fork", "tags", "trust", "dry_run", "force"}
IN_SETTINGS = ("path", "name", "started", "model", "strategy", "precision")
ENDED_EARLY = ("preempted", "cancelled", "failed", "died", "paused", "replaced")
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


def typed_keys(run_dir: Path) -> set[str]:
    """Return the names of the settings that were given in the launches of a run."""
    launches = read_json(run_dir / "launch.json").get("launches")
    lists = [as_dict(one).get("overrides") for one in launches] if isinstance(launches, list) else []
    return {str(word).lstrip("+~").partition("=")[0] for words in lists if isinstance(words, list) for word in words}


def compare(run_dirs: Sequence[Path]) -> dict[str, Any]:
    """Return the settings that differ between the runs, and their results: lists in the order of the runs.

    Of two options of a group, such as optim=adamw and sgd, the settings that only one of them has are left out, unless
    they were given.
    {"runs": [path, …], "settings": {key: [value, …]}, "results": {key: [value, …]}, "unreadable": [path, …]};
    a missing setting is None.
    """
    from dtrain.config.run_file import flat_config  # imported late: only comparisons need it

    dirs = [Path(d) for d in run_dirs]
    configs = [flat_config(d) for d in dirs]
    readable = [c for c in configs if c is not None]
    missing = object()
    settings: dict[str, list[Any]] = {}
    keys = dict.fromkeys(key for config in readable for key in config)
    # By text, because True == 1 and a list is not hashable.
    texts = {key: [repr(v) if (v := c.get(key, missing)) is not missing else "" for c in readable] for key in keys}
    differing = [key for key in keys if len(set(texts[key])) > 1]
    given = set().union(*map(typed_keys, dirs))
    others = {key.partition(".")[2] for key in differing if key.startswith("choices.")}  # groups with other options
    for key in sorted(differing, key=lambda key: not key.startswith("choices.")):
        name = key.removeprefix("choices.")
        of_option = key.partition(".")[0] in others and "" in texts[key] and key not in given
        if not (of_option or key.startswith("choices.recipe") or set(key.split(".")) & NOT_COMPARED):
            settings[name] = [None if c is None else c.get(key) for c in configs]
    runs = [record.row() for record in load(dirs)[0]]
    results = {key: [run[key] for run in runs] for key in COLUMNS if key not in IN_SETTINGS}
    results |= {key: [run.get(OWN_METRICS, {}).get(key) for run in runs] for key in own_columns(runs)}
    return {
        "runs": [run["path"] for run in runs],
        "settings": settings,
        "results": {key: values for key, values in results.items() if any(v is not None for v in values)},
        "unreadable": [str(d) for d, config in zip(dirs, configs, strict=True) if config is None],
    }


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


def print_compare(run_dirs: Sequence[Path], console: Console | None = None) -> None:
    """Print the settings that differ and the results, one column per run."""
    console = console or stdout_console()
    data = compare(run_dirs)
    # By position, because two runs may have the same name.
    columns = {"key": ""} | {str(i): name for i, name in enumerate(_headings(data["runs"]))}
    rows = []
    for part, note in (("settings", "settings that differ"), ("results", "results")):
        rows.append({key: "" for key in columns} | {"key": f"{note}:" if data[part] else f"{note}: none"})
        for key, values in data[part].items():
            texts = [cell(key, v) if part == "results" else _setting(v) for v in values]
            name = COLUMNS[key][0] if part == "results" and key in COLUMNS else key
            rows.append({"key": f"  {name}"} | {str(i): text for i, text in enumerate(texts)})
    print_table(console, columns, rows)
    for path in data["unreadable"]:
        note = f"settings of {short_path(Path(path))} are not compared: no readable config.yaml"
        say(console, (note, "yellow"))


def _setting(value: Any) -> str:
    if value is None:
        return "-"
    return clean(value if isinstance(value, str) else json.dumps(value, default=str))


def _headings(paths: list[str]) -> list[str]:
    """Return the runs' paths without their common parent folders."""
    common = os.path.commonpath([os.path.dirname(os.path.abspath(p)) for p in paths])
    return [os.path.relpath(os.path.abspath(p), common) for p in paths]


def print_sweep(run_dirs: Sequence[Path], console: Console | None = None) -> None:
    """Print one line per point of a sweep: its overrides and results; the best loss is marked."""
    console = console or stdout_console()
    records, problem = load(sorted((Path(d) for d in run_dirs), key=point))
    print_points([record.row() for record in records], console)
    say_problem(problem, console)


def not_started(folder: Path) -> dict[str, list[str]]:
    """The points of a sweep that have no run folder yet: name and overrides."""
    planned = as_dict(as_dict(read_json(folder / SWEEP)).get("points"))
    return {
        str(n): [str(o).lstrip("+") for o in v]
        for n, v in planned.items()
        if isinstance(v, list) and not (folder / n).exists()
    }


def point(run_dir: Path) -> tuple[float, int, str]:
    """Sort key: the number before a folder's name in a sweep, so that 2 comes before 10; then PBT's copies by step."""
    prefix, copied = re.match(r"(\d+)(-|$)", run_dir.name), re.match(r"\d+-at-(\d+)-from-", run_dir.name)
    return (int(prefix[1]) if prefix else math.inf), int(copied[1]) if copied else 0, run_dir.name


def print_points(runs: list[dict[str, Any]], console: Console) -> None:
    dirs = [Path(run["path"]) for run in runs]
    overrides = [_overrides(d) for d in dirs]
    whole = [words for d, words in zip(dirs, overrides, strict=True) if not is_fork(d)]  # a fork has few of its own
    waiting = not_started(dirs[0].parent) if dirs else {}
    shared = shared_words(dirs, overrides, waiting)
    key = "val_loss" if any(_finite(run["val_loss"]) for run in runs) else "train_loss"
    # the loss of a run that ended early is not its result
    ranked = [i for i, run in enumerate(runs) if _finite(run[key]) and run["status"] not in ENDED_EARLY]
    shown = {i: cell(key, runs[i][key]) for i in ranked}
    # several runs are best if their losses look the same: strategies of one computation differ in the 7th digit
    best = [i for i in ranked if shown[i] == shown[min(ranked, key=lambda i: runs[i][key])]]
    keys = [k for k in ("status", "steps", "job_id", *RESULTS, *ERRORS) if any(run[k] is not None for run in runs)]
    if len({(run["steps"], run["total_steps"]) for run in runs}) == 1 and runs[0]["steps"] == runs[0]["total_steps"]:
        keys = [k for k in keys if k != "steps"]
    own = own_columns(runs)
    rows = []
    for i, run in enumerate(runs):
        rows.append(
            {
                "point": point_text(dirs[i]),
                "overrides": clean(" ".join(o for o in overrides[i] if o not in shared)) or "-",
                **{k: cell(k, run[k]) for k in keys},
                **({"steps": steps_text(run)} if "steps" in keys else {}),
                **own_cells(run, own),
                "best": "← best" if i in best else "",
            }
        )
    columns = {"point": "#", "overrides": "overrides"} | {k: COLUMNS[k][0] for k in keys}
    columns |= {name: name for name in own} | {"best": f"by {COLUMNS[key][0]}" if ranked else ""}
    print_table(console, columns, rows, [*ERRORS, "mfu", "wall_s", "peak_mem_gib", "tokens_per_s", "job_id"], best)
    for i in [i for i, run in enumerate(runs) if run["status"] == "failed"][:MOST_WAITING]:
        if failure := read_json(dirs[i] / "failure.json"):
            say(console, (clean(f"{rows[i]['point']}  failed: {one_line(failure)}"), "dim"))
            say(console, (f"{' ' * len(rows[i]['point'])}  dtrain why {shell_path(dirs[i])}", "cyan"))
    if shared:
        say(console, (f"all jobs: {' '.join(o for o in [*whole, *waiting.values()][0] if o in shared)}", "dim"))
    for i, (name, words) in enumerate(waiting.items()):
        if i == MOST_WAITING:
            say(console, (f"and {len(waiting) - i} more not started", "dim"))
            break
        what = " ".join(word for word in words if word not in shared)
        say(console, (f"{point_text(Path(name))}  {what}  not started", "dim"))


def point_text(run_dir: Path) -> str:
    """The number of a point, or its name if it has none."""
    number_of = point(run_dir)[0]
    return str(number_of) if number_of != math.inf else run_dir.name


def steps_text(run: dict[str, Any]) -> str:
    total = run.get("total_steps")
    return cell("steps", run["steps"]) + (f"/{total}" if run["steps"] is not None and total is not None else "")


def shared_words(dirs: Sequence[Path], overrides: Sequence[list[str]], waiting: dict[str, list[str]]) -> set[str]:
    """The overrides that all points have, also those that have not begun; a fork has few of its own."""
    whole = [set(words) for d, words in zip(dirs, overrides, strict=True) if not is_fork(d)]
    whole += map(set, waiting.values())
    return set.intersection(*whole) if len(whole) > 1 else set()


def own_words(dirs: Sequence[Path]) -> list[str]:
    """What distinguishes each point of a sweep: its overrides that not all of them have."""
    overrides = [_overrides(d) for d in dirs]
    shared = shared_words(dirs, overrides, not_started(dirs[0].parent) if dirs else {})
    return [clean(" ".join(word for word in words if word not in shared)) for words in overrides]


def say_problem(problem: str, console: Console) -> None:
    """Report that SLURM did not answer, so that the statuses come from the files only."""
    if problem:
        say(console, (f"SLURM did not answer, so this is from the run folders only: {problem}", "yellow"))


def is_fork(run_dir: Path) -> bool:
    """Return whether a search made the run from another one's checkpoint."""
    origin = as_dict(read_json(run_dir / "launch.json").get("forked_from"))
    return origin.get("by") == "search" or "steps" in origin  # steps: of an older version


def _overrides(run_dir: Path) -> list[str]:
    """Return what the run was launched with, as far as it says something, with what its resumes have changed."""
    launch = read_json(run_dir / "launch.json")
    launches = launch.get("launches")
    all_of_them = [as_dict(one).get("overrides") for one in launches] if isinstance(launches, list) else []
    first, *later = [
        *([all_of_them[0]] if all_of_them and all_of_them[0] else [launch.get("overrides")]),
        *all_of_them[1:],
    ]
    name = re.sub(r"^\d+-", "", run_dir.name)
    if not isinstance(first, list):
        return [name]
    ours = ["run_dir", "resume", "resume_allow", "fork"]
    if (run_dir.parent / JOURNAL).is_file():  # a search gives it, to pause the trial
        ours.append("train.stop_after")
    typed: dict[str, str] = {}
    for words in (first, *(words for words in later if isinstance(words, list))):
        given = {str(o).lstrip("+").partition("=")[0]: str(o).lstrip("+") for o in words}
        typed |= {key: o for key, o in given.items() if key not in ours and o != "recipe=as-run"}
    return [name, *typed.values()] if is_fork(run_dir) else list(typed.values())


def _finite(value: object) -> bool:
    n = number(value)
    return n is not None and math.isfinite(n)
