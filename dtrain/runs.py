"""Run folders: find one by name, list them, compare them, and the `dtrain runs` command."""

from __future__ import annotations

import argparse
import difflib
import json
import math
import os
import re
import socket
import time
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dtrain.console import print_error, print_summary, say, stdout_console
from dtrain.rundir import last_launch, launch_time, read_json, read_summary
from dtrain.words import as_dict, clean, duration, gib, loss_text, number, percent, short_path, si

if TYPE_CHECKING:
    from rich.console import Console

ROOTS = ("outputs", "multirun")
QUIET_S = 600  # a running run that wrote nothing for this long is doubted: compiling or saving takes less
FIGURES = ("train_loss", "val_loss", "tokens_per_s", "mfu", "peak_mem_gib", "wall_s")
LARGE_IS_GOOD = ("tokens_per_s", "mfu", "steps", "total_steps", "world_size", "started")

# Heading and format of each key of a run, in the order of the table.
COLUMNS: dict[str, tuple[str, Any]] = {
    "path": ("run", lambda path: short_path(Path(path))),
    "name": ("name", str),
    "status": ("status", str),
    "model": ("model", str),
    "strategy": ("strategy", str),
    "precision": ("precision", str),
    "world_size": ("ranks", str),
    "steps": ("steps", str),
    "total_steps": ("total steps", str),
    "train_loss": ("train loss", loss_text),
    "val_loss": ("val loss", loss_text),
    "tokens_per_s": ("tok/s", si),
    "mfu": ("MFU", percent),
    "peak_mem_gib": ("memory", gib),
    "wall_s": ("wall", duration),
    "started": ("started", lambda text: datetime.fromisoformat(text).astimezone().strftime("%Y-%m-%d %H:%M")),
}
DEFAULT_COLUMNS = tuple(key for key in COLUMNS if key not in ("name", "total_steps", "started"))
# A narrow terminal loses these first.
LEAST_NEEDED = ("precision", "wall_s", "peak_mem_gib", "world_size", "mfu", "model", "tokens_per_s")

# ---------------------------------------------------------------- finding


def run_folders(root: Path, levels: int = 4) -> Iterator[Path]:
    """The folders with a launch.json at or below root; not inside one, where a checkpoint has many files."""
    if (root / "launch.json").is_file():
        yield root
        return
    if levels == 0:
        return
    try:
        with os.scandir(root) as entries:
            folders = [e.path for e in entries if e.name[0] != "." and e.is_dir(follow_symlinks=False)]
    except OSError:  # not there, or not ours to read
        return
    for folder in sorted(folders):
        yield from run_folders(Path(folder), levels - 1)


def started(run_dir: Path) -> float:
    """When a run was last launched, in seconds since the epoch."""
    path = run_dir / "launch.json"
    try:
        written = path.stat().st_mtime
    except OSError:  # removed while we look
        return 0.0
    said = launch_time(read_json(path))
    # The file's time orders two launches of one second; it is only right while the folder was not copied.
    return written if said is None or abs(written - said) < 2 else said


def find_run(word: str, roots: Sequence[str | Path] = ROOTS) -> Path:
    """The run folder meant by a path, by `latest`, or by a part of its name that no other run has."""
    path = Path(word).expanduser()
    if word != "latest" and (path / "launch.json").is_file():
        return path.absolute()
    inside = list(run_folders(path)) if word != "latest" and path.is_dir() else []
    if inside:
        raise ValueError(
            f"run {word!r}: the folder holds {len(inside)} runs and is not one itself\n"
            f"  fix: name one of them:{_bullets(inside)}"
        )
    runs = sorted((run for root in roots for run in run_folders(Path(root))), key=started, reverse=True)
    where = " and ".join(f"{root}/" for root in roots)
    if not runs:
        raise ValueError(
            f"run {word!r}: no run folder (with a launch.json) is there, nor under {where} of {Path.cwd()}\n"
            "  fix: start one with `python launch.py`, or change to the folder where you did"
        )
    if word == "latest":
        return runs[0].absolute()
    text = word.rstrip("/")
    # The strictest rule that any run meets decides: `3-lr=0.1` is not ambiguous because of `13-lr=0.1`.
    for meets in (
        lambda run: text in (run.name, run_name(run)),
        lambda run: str(run).endswith(text),
        lambda run: text in run.name,
        lambda run: text in str(run),
    ):
        matches = [run for run in runs if text and meets(run)]
        if len(matches) == 1:
            return matches[0].absolute()
        if matches:
            raise ValueError(
                f"run {word!r}: {len(matches)} runs have that in their name; it must mean one\n"
                f"  fix: give more of the path; newest first:{_bullets(matches)}"
            )
    names = {name: run for run in runs for name in (str(run), run.name, run_name(run))}
    near = [names[name] for name in difflib.get_close_matches(text, names, n=5, cutoff=0.5)]
    hint = f"did you mean{_bullets(dict.fromkeys(near))}" if near else f"the newest are{_bullets(runs)}"
    raise ValueError(
        f"run {word!r}: no such folder, and none of the {len(runs)} runs under {where} has that in its name\n"
        f"  fix: {hint}"
    )


def _bullets(paths: Any, most: int = 5) -> str:
    paths = list(paths)
    more = [f"… and {len(paths) - most} more; `dtrain runs` lists them"] if len(paths) > most else []
    return "".join(f"\n    {line}" for line in [short_path(p) for p in paths[:most]] + more)


def run_name(run_dir: Path) -> str:
    """The folder's name without the time of day in front of it."""
    return re.sub(r"^\d\d-?\d\d-?\d\d(-\d+)?-(?=.)", "", run_dir.name)


# ---------------------------------------------------------------- reading


def run_status(run_dir: Path, launch: dict[str, Any], summary: dict[str, Any]) -> str:
    """The status, corrected for a run that was killed and could not write it.

    `died`: its supervising process, on this host, is gone. `running?`: nobody wrote to it for long.
    """
    status = summary.get("status")
    if not status and (run_dir / "failure.json").is_file():
        return "failed"
    if status not in (None, "running"):
        return str(status)
    word = "running" if status else "starting"
    launch = last_launch(launch)
    pid = launch.get("pid")
    # A submitted job outlives the process that submitted it, so that pid says nothing.
    cluster = as_dict(launch.get("cluster")).get("_target_", "local")
    local = "local" in str(cluster) and not launch.get("job_id")
    if local and isinstance(pid, int) and pid > 0 and launch.get("host") == socket.gethostname():
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return "died"
        except (OSError, OverflowError):
            pass  # someone else's process: alive
    touched = 0.0
    for name in ("summary.json", "metrics.jsonl", "launch.json"):
        try:
            touched = max(touched, (run_dir / name).stat().st_mtime)
        except OSError:
            pass
    return word if time.time() - touched < QUIET_S else word + "?"


def read_run(run_dir: Path) -> dict[str, Any]:
    """What is known of one run, by the keys of COLUMNS. Without config.yaml, which takes 20 times longer."""
    launch, summary = read_json(run_dir / "launch.json"), read_summary(run_dir)
    run: dict[str, Any] = {
        "path": str(run_dir),
        "name": summary.get("name") or launch.get("name") or run_name(run_dir),
        "status": run_status(run_dir, launch, summary),
    }
    for key in ("model", "strategy", "precision", "world_size", "steps", "total_steps", *FIGURES):
        run[key] = summary.get(key)
    # UTC, so that text order is time order.
    run["started"] = datetime.fromtimestamp(started(run_dir), UTC).isoformat(timespec="microseconds")
    return run


def list_runs(roots: Sequence[str | Path] = ROOTS) -> list[dict[str, Any]]:
    """Every run below the roots, the newest launch first."""
    # A root inside another one must not list its runs twice.
    folders = {os.path.abspath(run): run for root in roots for run in run_folders(Path(root))}
    return sort_runs([read_run(run) for run in folders.values()], "started")


def sort_runs(runs: list[dict[str, Any]], key: str) -> list[dict[str, Any]]:
    """Best first: small losses, large speeds, new runs; unknown values last."""
    if key not in COLUMNS:
        near = difflib.get_close_matches(key, COLUMNS, n=1, cutoff=0.4)
        hint = f"did you mean {near[0]}? " if near else ""
        raise ValueError(f"sort={key}: not a column\n  fix: {hint}sort can be {', '.join(COLUMNS)}")

    def value(run: dict[str, Any]) -> float | str | None:
        n = number(run.get(key))
        if key in FIGURES or key in ("world_size", "steps", "total_steps"):
            return None if n is None or math.isnan(n) else n
        return None if run.get(key) is None else str(run[key])

    known = [(value(run), i) for i, run in enumerate(runs) if value(run) is not None]
    order = [i for _, i in sorted(known, key=lambda pair: pair[0], reverse=key in LARGE_IS_GOOD)]  # type: ignore
    return [runs[i] for i in order] + [run for run in runs if value(run) is None]


def flat_config(run_dir: Path) -> dict[str, Any] | None:
    """config.yaml as {"train.steps": 100, …}, a list being one value; None when it cannot be read."""
    import yaml  # 28 ms, and OmegaConf behind the other: only a comparison needs them

    from dtrain.config import flatten

    try:
        loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
        tree = yaml.load((run_dir / "config.yaml").read_bytes(), loader)
    except (OSError, ValueError, yaml.YAMLError):
        return None
    flat = flatten(as_dict(tree))
    flat.pop("run_dir", None)  # differs always, and is the heading of the table
    return flat


def compare(run_dirs: Sequence[Path]) -> dict[str, Any]:
    """What differs between the runs' settings, and their results: lists in the order of the runs.

    {"runs": [path, …], "settings": {key: [value, …]}, "results": {key: [value, …]}, "unreadable": [path, …]};
    a setting that a run does not have is None there.
    """
    dirs = [Path(d) for d in run_dirs]
    configs = [flat_config(d) for d in dirs]
    readable = [c for c in configs if c is not None]
    missing = object()
    settings: dict[str, list[Any]] = {}
    for key in dict.fromkeys(key for config in readable for key in config):
        values = [c.get(key, missing) for c in readable]
        # By text, because True == 1 and a list is not hashable.
        if len({repr(v) if v is not missing else "" for v in values}) > 1:
            settings[key] = [None if c is None else c.get(key) for c in configs]
    runs = [read_run(d) for d in dirs]
    results = {key: [run[key] for run in runs] for key in COLUMNS if key not in ("path", "name", "started")}
    return {
        "runs": [run["path"] for run in runs],
        "settings": settings,
        "results": {key: values for key, values in results.items() if any(v is not None for v in values)},
        "unreadable": [str(d) for d, config in zip(dirs, configs, strict=True) if config is None],
    }


# ---------------------------------------------------------------- printing


def cell(key: str, value: Any) -> str:
    return "-" if value is None else clean(COLUMNS[key][1](value))


def print_table(
    console: Console,
    columns: dict[str, str],
    rows: list[dict[str, str]],
    droppable: Sequence[str] = (),
    best: int | None = None,
) -> None:
    """Rows of text by column. A terminal hides droppable columns that do not fit; a file gets full lines."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    def build() -> Table:
        table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
        for key, heading in columns.items():
            numeric = key in COLUMNS and COLUMNS[key][1] in (loss_text, si, percent, gib, duration)
            table.add_column(Text(heading), justify="right" if numeric else "left", overflow="fold")
        for i, row in enumerate(rows):
            cells = [Text(row[key], style=_style(row[key]) if key == "status" else "") for key in columns]
            table.add_row(*cells, style="bold green" if i == best else "")
        return table

    wide = Console(width=100_000, color_system=None, force_terminal=False)
    if not console.is_terminal:
        with wide.capture() as text:
            wide.print(build())
        for line in text.get().splitlines():
            say(console, line.rstrip())
        return
    hidden: list[str] = []
    for key in droppable:
        if wide.measure(build()).maximum <= console.width:
            break
        if key in columns:
            columns = {k: v for k, v in columns.items() if k != key}
            hidden.append(key)
    console.print(build(), highlight=False)
    if hidden:
        headings = ", ".join(COLUMNS[key][0] if key in COLUMNS else key for key in hidden)
        say(console, (f"hidden to fit {console.width} columns: {headings}", "dim"))


def _style(status: str) -> str:
    return {"done": "green", "failed": "red", "died": "red", "preempted": "yellow"}.get(status, "cyan")


def print_runs(
    runs: list[dict[str, Any]],
    console: Console | None = None,
    sort: str | None = None,
    columns: Sequence[str] = DEFAULT_COLUMNS,
) -> None:
    """One line a run. sort: a key of COLUMNS, best first; otherwise in the order given."""
    console = console or stdout_console()
    runs = sort_runs(runs, sort) if sort else runs
    # A column that no run fills (MFU on CPUs) or that nobody asked for is noise; the sorted one is not.
    keys = [k for k in COLUMNS if (k in columns or k == sort) and any(run.get(k) is not None for run in runs)]
    if not runs:
        say(console, "no runs here yet: start one with `python launch.py`")
        return
    rows = [{key: cell(key, run.get(key)) for key in keys} for run in runs]
    for run, row in zip(runs, rows, strict=True):
        if "steps" in row and run.get("total_steps") is not None:
            row["steps"] += f"/{run['total_steps']}"
    print_table(console, {key: COLUMNS[key][0] for key in keys}, rows, [k for k in LEAST_NEEDED if k != sort])


def print_compare(run_dirs: Sequence[Path], console: Console | None = None) -> None:
    """The settings that differ and the results, a column a run."""
    console = console or stdout_console()
    data = compare(run_dirs)
    # By position, as two runs may have one name.
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
    """The runs' paths without the folders that all of them share."""
    common = os.path.commonpath([os.path.dirname(os.path.abspath(p)) for p in paths])
    return [os.path.relpath(os.path.abspath(p), common) for p in paths]


def print_sweep(run_dirs: Sequence[Path], console: Console | None = None, sort: str | None = None) -> None:
    """One line a job of a sweep: what was varied and what came of it; the best loss is marked."""
    console = console or stdout_console()

    def job(run_dir: Path) -> tuple[float, str]:
        prefix = re.match(r"(\d+)(-|$)", run_dir.name)
        return (int(prefix[1]) if prefix else math.inf), run_dir.name

    runs = [read_run(d) for d in sorted((Path(d) for d in run_dirs), key=job)]
    runs = sort_runs(runs, sort) if sort else runs
    dirs = [Path(run["path"]) for run in runs]
    overrides = [_overrides(d) for d in dirs]
    shared = set.intersection(*map(set, overrides)) if len(dirs) > 1 else set()
    key = "val_loss" if any(_finite(run["val_loss"]) for run in runs) else "train_loss"
    ranked = [i for i, run in enumerate(runs) if _finite(run[key])]
    best = min(ranked, key=lambda i: runs[i][key]) if ranked else None
    keys = [k for k in ("status", *FIGURES) if any(run[k] is not None for run in runs)]
    rows = []
    for i, run in enumerate(runs):
        number_of = job(dirs[i])[0]
        rows.append(
            {
                "job": str(number_of) if number_of != math.inf else dirs[i].name,
                "overrides": clean(" ".join(o for o in overrides[i] if o not in shared)) or "-",
                **{k: cell(k, run[k]) for k in keys},
                "best": "← best" if i == best else "",
            }
        )
    columns = {"job": "job", "overrides": "overrides"} | {k: COLUMNS[k][0] for k in keys} | {"best": ""}
    print_table(console, columns, rows, ["mfu", "wall_s", "peak_mem_gib", "tokens_per_s"], best)
    if shared:
        say(console, (f"all jobs: {' '.join(o for o in overrides[0] if o in shared)}", "dim"))


def _overrides(run_dir: Path) -> list[str]:
    launch = read_json(run_dir / "launch.json")
    found = launch.get("overrides") or last_launch(launch).get("overrides")
    return [str(o) for o in found] if isinstance(found, list) else [re.sub(r"^\d+-", "", run_dir.name)]


def _finite(value: object) -> bool:
    n = number(value)
    return n is not None and math.isfinite(n)


def strict_json(value: Any) -> Any:
    """NaN and infinity as null: json writes them as words that jq and other languages refuse."""
    if isinstance(value, dict):
        return {str(key): strict_json(v) for key, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [strict_json(v) for v in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def main(argv: list[str]) -> int:
    """`dtrain runs`: list the runs, show one, or compare several."""
    parser = argparse.ArgumentParser("dtrain runs", description="List runs, show one, or compare several.")
    parser.add_argument(
        "run",
        nargs="*",
        metavar="RUN",
        help="a run folder, `latest`, or a part of its name; a sweep's folder shows its jobs",
    )
    parser.add_argument("--json", action="store_true", help="print data instead of a table")
    parser.add_argument("--sort", metavar="KEY", help=f"best first by one of: {', '.join(COLUMNS)}")
    parser.add_argument(
        "--root",
        action="append",
        metavar="DIR",
        help=f"where to look, may be repeated (default: {' and '.join(ROOTS)})",
    )
    parser.add_argument("--limit", type=int, metavar="N", help="show only the first N")
    options = parser.parse_args(argv)
    roots = options.root or list(ROOTS)
    try:
        if options.limit is not None and options.limit < 1:
            raise ValueError(f"--limit={options.limit}: must be at least 1\n  fix: leave it out to see all")
        for root in options.root or []:
            if not Path(root).is_dir():
                raise ValueError(f"--root={root}: no such folder\n  fix: name the one that holds the runs")
        _show(options, roots)
    except ValueError as error:
        print_error(str(error))
        return 2
    return 0


def _show(options: argparse.Namespace, roots: list[str]) -> None:
    data: Any
    jobs = _sweep_jobs(options.run)
    if jobs or not options.run:
        runs = [read_run(job) for job in jobs] if jobs else list_runs(roots)
        data = (sort_runs(runs, options.sort) if options.sort else runs)[: options.limit]
        if not options.json:
            if jobs:
                print_sweep([Path(run["path"]) for run in data], sort=options.sort)
            else:
                print_runs(data, sort=options.sort)
            if len(runs) > len(data):
                say(stdout_console(), (f"{len(runs) - len(data)} more were left out by --limit", "dim"))
    else:
        dirs = [find_run(word, roots) for word in options.run]
        data = compare(dirs) if len(dirs) > 1 else read_run(dirs[0])
        if not options.json:
            if len(dirs) > 1:
                print_compare(dirs)
            else:
                print_summary(dirs[0], status=data["status"])
    if options.json:
        print(json.dumps(strict_json(data), indent=2, default=str))


def _sweep_jobs(words: list[str]) -> list[Path]:
    """The runs below the one folder named, when it is not a run itself."""
    folder = Path(words[0]).expanduser() if len(words) == 1 else None
    if folder is None or (folder / "launch.json").is_file():
        return []
    return list(run_folders(folder))
