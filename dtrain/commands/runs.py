"""`dtrain runs`: list runs, compare them, or show the table of a sweep."""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

from dtrain.commands.run_parser import RunParser
from dtrain.errors import bad
from dtrain.runs import environment, tags
from dtrain.runs.find import find_run
from dtrain.runs.folder import read_json
from dtrain.runs.record import ROOTS, all_runs, load, read_run, run_folders
from dtrain.runs.where import chosen
from dtrain.ui.comparison import compare, print_compare
from dtrain.ui.console import print_error, print_summary, say, stdout_console
from dtrain.ui.sweep_table import point, print_points
from dtrain.ui.tables import print_runs, say_problem, sort_runs
from dtrain.util.format import counted, without_nan

CHANGES = {
    "tag": ("TAG", "Give a run words to find it by: dtrain runs --where tag=good"),
    "untag": ("TAG", "Take words from a run."),
    "note": ("TEXT", "Write a sentence to a run."),
}


def main(argv: list[str]) -> int:
    """`dtrain runs`: list the runs, show one, or compare several."""
    if argv[:1] and argv[0] in CHANGES:
        try:
            return change(argv[0], argv[1:])
        except ValueError as error:
            print_error(str(error))
            return 2
    parser = RunParser(
        "dtrain runs",
        description="List runs, show one, or compare several. `dtrain runs tag RUN WORD…`, `untag RUN WORD…` and `note "
        "RUN TEXT` write words and sentences to a run.",
    )
    parser.add_argument(
        "run",
        nargs="*",
        metavar="RUN",
        help="a run folder, `latest`, or a part of its name; a sweep's folder shows its jobs",
    )
    parser.add_argument("--json", action="store_true", help="print data instead of a table")
    parser.add_argument(
        "--where",
        metavar="CONDITION",
        help="only runs that meet it, e.g. 'val_loss<2 and strategy=fsdp', 'tag=good or optim.lr>=1e-3', 'age<2d', "
        "'started>2026-11-01', 'name~gpt2': = != < <= > >= ~ (contains), and, or, not, ()",
    )
    parser.add_argument(
        "--sort",
        metavar="KEY",
        help="best first by a column, e.g. val_loss, 'val loss', tok/s, wall, started, or a metric of your own",
    )
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
        if options.where is not None:
            kept = chosen(options.where, records, runs, time.time())
            runs = [run for run, meets in zip(runs, kept, strict=True) if meets]
        data = (sort_runs(runs, options.sort) if options.sort else runs)[: options.limit]
        if not options.json:
            if options.where is not None and not runs:
                say(stdout_console(), f"none of {counted(len(records), 'run')} meets it")
            elif len({path.parent for path in points}) == 1:  # else a folder of several sweeps
                print_points(data, stdout_console())
            else:
                print_runs(data, sort=options.sort)
            say_problem(problem, stdout_console())
            if len(runs) > len(data):
                say(stdout_console(), (f"{len(runs) - len(data)} more were left out by --limit", "dim"))
    elif options.where is not None:
        raise bad("--where", options.where, "lists runs, and runs are named", "leave out the names, or --where")
    else:
        dirs = [find_run(word, roots) for word in options.run]
        data = compare(dirs) if len(dirs) > 1 else read_run(dirs[0])
        if not options.json:
            if len(dirs) > 1:
                print_compare(dirs)
            else:
                print_summary(dirs[0], status=data["status"])
                print_tags(dirs[0])
                print_environment(dirs[0])
        elif len(dirs) == 1:
            data["environment"] = environment.recorded(read_json(dirs[0] / "launch.json").get("launches")) or None
    if options.json:
        print(json.dumps(without_nan(data), indent=2, default=str))


def change(what: str, argv: list[str]) -> int:
    """`dtrain runs tag`, `untag` and `note`."""
    words, description = CHANGES[what]
    parser = RunParser(f"dtrain runs {what}", description=description)
    parser.add_argument("run", help="a run folder, a part of its name, or latest")
    parser.add_argument(words.lower(), nargs="+", metavar=words)
    options = parser.parse_args(argv)
    run_dir = find_run(options.run)
    if what == "note":
        tags.note(run_dir, " ".join(options.text))
    elif what == "tag":
        tags.change(run_dir, add=options.tag)
    else:
        tags.change(run_dir, remove=options.tag)
    print_tags(run_dir)
    return 0


def print_tags(run_dir: Path) -> None:
    label = "{:<17}".format
    if found := tags.tags_of(run_dir):
        say(stdout_console(), (label("tags"), "dim"), " ".join(found))
    for when, text in tags.notes_of(run_dir):
        say(stdout_console(), (label("note"), "dim"), f"{when}  {text}")


def print_environment(run_dir: Path) -> None:
    """Print the code, packages, machine and variables of the newest launch."""
    launches, label = read_json(run_dir / "launch.json"), "{:<17}".format
    packages = " ".join(f"{name} {version}," for name, version in environment.versions(launches).items())
    for name, text in [*environment.rows(launches), *([("packages", packages.rstrip(","))] if packages else [])]:
        say(stdout_console(), (label(name), "dim"), text)


def sweep_points(word: str) -> list[Path]:
    """Return the runs below this folder, if it is not a run itself."""
    folder = Path(word).expanduser()
    return [] if (folder / "launch.json").is_file() else list(run_folders(folder))
