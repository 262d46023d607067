"""`dtrain runs`: list runs, compare them, or show the table of a sweep."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from dtrain.runs.find import find_run
from dtrain.runs.record import ROOTS, all_runs, load, read_run, run_folders
from dtrain.ui.console import print_error, print_summary, say, stdout_console
from dtrain.ui.tables import COLUMNS, compare, point, print_compare, print_points, print_runs, say_problem, sort_runs
from dtrain.util.format import without_nan


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
                raise ValueError(f"--root={root}: no such folder\n  fix: give the folder that holds the runs")
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
        print(json.dumps(without_nan(data), indent=2, default=str))


def sweep_points(word: str) -> list[Path]:
    """Return the runs below this folder, if it is not a run itself."""
    folder = Path(word).expanduser()
    return [] if (folder / "launch.json").is_file() else list(run_folders(folder))
