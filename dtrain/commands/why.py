"""`dtrain why`: why a run ended, in one paragraph, with the evidence below it; of a sweep, for each failed point."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from dtrain.commands.run_parser import RunParser
from dtrain.commands.runs import sweep_points
from dtrain.report.why import Diagnosis, as_data, diagnose
from dtrain.runs.find import find_run
from dtrain.runs.record import Record, load
from dtrain.runs.search_journal import JOURNAL, STUDY
from dtrain.ui.console import say, stdout_console
from dtrain.ui.sweep_table import ENDED_EARLY, not_started, own_words, point, point_text
from dtrain.ui.tables import STYLES, say_problem
from dtrain.util.format import clean, counted, shell_path, short_path, without_nan

if TYPE_CHECKING:
    from rich.console import Console


def main(argv: list[str]) -> int:
    """`dtrain why`: the cause, the rank that came first, and whether starting again helps."""
    parser = RunParser(
        "dtrain why", description="Say why a run ended, with the evidence; of a sweep, for each failed point."
    )
    parser.add_argument(
        "run",
        nargs="?",
        default="latest",
        help="a run folder, a part of its name, or latest; or a sweep's folder",
    )
    parser.add_argument("--json", action="store_true", help="print data instead of text")
    options = parser.parse_args(argv)
    points = sorted(sweep_points(options.run), key=point)
    records, problem = load(points or [find_run(options.run)], ask_all=True)
    console = stdout_console()
    if points:
        found = {record.run_dir: diagnose(record) for record in records if record.status.rstrip("?") in ENDED_EARLY}
        if options.json:
            data = [{"run": str(run_dir), **as_data(one)} for run_dir, one in found.items()]
            print(json.dumps(without_nan(data), indent=2, default=str))
            return 0
        print_points(Path(options.run), records, found, console)
    else:
        one = diagnose(records[0])
        if options.json:
            print(json.dumps(without_nan(as_data(one)), indent=2, default=str))
            return 0
        print_one(records[0].run_dir, one, console)
    say_problem(problem, console)
    return 0


def print_one(run_dir: Path, found: Diagnosis, console: Console) -> None:
    say(console, (f"{'run':<17}", "dim"), short_path(run_dir))
    say(console, (f"{'cause':<17}", "dim"), (found.cause, "bold"))
    where = [f"rank {found.rank}"] if found.rank is not None else []
    where += [f"on {found.node}"] if found.node else []
    where += [f"step {found.step}"] if found.step is not None else []
    if where and found.cause != "nothing":
        say(console, (f"{'where':<17}", "dim"), ", ".join(where))
    say(console, "")
    say(console, found.paragraph)
    say(console, "")
    for i, one in enumerate(found.evidence):
        say(console, (f"{'' if i else 'evidence':<17}", "dim"), str(one))
    for i, command in enumerate(found.next):
        say(console, (f"{'' if i else 'next':<17}", "dim"), (command, "cyan"))


def print_points(folder: Path, records: Sequence[Record], found: dict[Path, Diagnosis], console: Console) -> None:
    """Print the cause and a command for each point that did not end well."""
    counts = Counter(record.shown_status.rstrip("?") for record in records)
    waiting = not_started(folder)
    counts.update({"not started": len(waiting)} if waiting else {})
    states = ", ".join(f"{number} {status}" for status, number in counts.items())
    say(console, (f"{'sweep':<17}", "dim"), short_path(folder))
    say(console, (f"{'points':<17}", "dim"), f"{sum(counts.values())}: {states}")
    dirs = [record.run_dir for record in records]
    is_one = len({run_dir.parent for run_dir in dirs}) == 1  # else a folder of several sweeps, whose numbers repeat
    names = [f"{point_text(run_dir):<4}" for run_dir in dirs] if is_one else [short_path(d) for d in dirs]
    words = own_words(dirs) if is_one else [""] * len(dirs)
    for record, name, own in zip(records, names, words, strict=True):
        if (one := found.get(record.run_dir)) is None:
            continue
        status = record.shown_status
        say(console, "")
        say(console, (name, "bold"), f"{own}  ", (status, STYLES.get(status, "")), (f"  {one.cause}", "bold"))
        what = clean(one.what)
        say(console, f"    {what[:1].upper()}{what[1:]}", *([f" {one.advice}"] if one.advice else []))
        command = next(iter(one.next), f"dtrain why {shell_path(record.run_dir)}")
        say(console, "    ", (command, "cyan"))
    say(console, "")
    if not found and not waiting:
        say(console, "No point of it has failed.")
    elif any((run_dir.parent / name).is_file() for run_dir in found for name in (JOURNAL, STUDY)):
        say(
            console,
            "The command of the search, repeated, resumes what was stopped; a failed trial counts as the worst.",
        )
    else:
        again = counted(len(found) + len(waiting), "point")
        say(console, f"The command of the sweep, repeated, runs {again} again; finished points are kept.")
