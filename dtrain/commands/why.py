"""`dtrain why`: why a run ended, in one paragraph, with the evidence below it."""

from __future__ import annotations

import argparse
import json

from dtrain.report.why import as_data, diagnose
from dtrain.runs.find import find_run
from dtrain.runs.record import load
from dtrain.ui.console import say, stdout_console
from dtrain.ui.tables import say_problem
from dtrain.util.format import short_path, without_nan


def main(argv: list[str]) -> int:
    """`dtrain why`: the cause, the rank that came first, and whether starting again helps."""
    parser = argparse.ArgumentParser("dtrain why", description="Say why a run ended, with the evidence.")
    parser.add_argument("run", nargs="?", default="latest", help="a run folder, a part of its name, or latest")
    parser.add_argument("--json", action="store_true", help="print data instead of text")
    options = parser.parse_args(argv)
    records, problem = load([find_run(options.run)], ask_all=True)
    found = diagnose(records[0])
    if options.json:
        print(json.dumps(without_nan(as_data(found)), indent=2, default=str))
        return 0
    console = stdout_console()
    say(console, (f"{'run':<17}", "dim"), short_path(records[0].run_dir))
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
    say_problem(problem, console)
    return 0
