"""Run folders: find one by name, list them, compare them, and the `dtrain runs` command."""

from __future__ import annotations

import argparse
import difflib
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from dtrain.console import print_error, print_summary, say, stdout_console
from dtrain.records import ROOTS, all_runs, load, read_run, run_folders, run_name
from dtrain.tables import (
    COLUMNS,
    compare,
    point,
    print_compare,
    print_points,
    print_runs,
    print_sweep,
    say_problem,
    sort_runs,
)  # fmt: skip
from dtrain.words import short_path

__all__ = ["find_run", "main", "print_sweep", "read_run", "strict_json"]


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
    runs = all_runs(roots)
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
    points = sweep_points(options.run[0]) if len(options.run) == 1 else []
    if points or not options.run:
        records, problem = load(sorted(points, key=point) or all_runs(roots))
        runs = [record.row() for record in records]
        data = (sort_runs(runs, options.sort) if options.sort else runs)[: options.limit]
        if not options.json:
            if points:
                print_points(data, stdout_console())
            else:
                print_runs(data, sort=options.sort)
            say_problem(problem, stdout_console())
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


def sweep_points(word: str) -> list[Path]:
    """The runs below the folder named, when it is not a run itself."""
    folder = Path(word).expanduser()
    return [] if (folder / "launch.json").is_file() else list(run_folders(folder))
