"""`dtrain report RUN...`: one HTML page, or one picture, of one or several runs."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from dtrain.commands.run_parser import RunParser
from dtrain.config.redaction import hide
from dtrain.runs.find import find_run
from dtrain.runs.record import run_folders, run_name
from dtrain.ui.console import say, stdout_console
from dtrain.util.format import clean, short_path

FORMATS = ("html", "png", "svg")
MOST_RUNS = 1000


def main(argv: list[str]) -> int:
    """Write a report of the runs and print its path."""
    parser = RunParser(
        "dtrain report",
        description="Write one HTML file about runs: curves, plan, ranks, attempts, system metrics, settings. "
        "It opens from disk and needs no network.",
    )
    parser.add_argument(
        "run", nargs="+", metavar="RUN", help="a run folder, a part of its name, latest, or a folder of runs (a sweep)"
    )
    parser.add_argument("-o", "--output", metavar="FILE", help="default: report.html (png, svg) in the run's folder")
    parser.add_argument("--format", choices=FORMATS, help="html, or one picture of loss, speed and memory (matplotlib)")
    options = parser.parse_args(argv)
    run_dirs = find_runs(options.run)
    kind = format_of(options.format, options.output)
    file = Path(options.output) if options.output else default_file(options.run, run_dirs, kind)
    if file.is_dir():
        raise ValueError(f"--output={file}: is a folder\n  fix: name a file: -o {file / ('report.' + kind)}")
    if not file.parent.is_dir():
        raise ValueError(f"--output={file}: the folder {file.parent} does not exist\n  fix: mkdir -p {file.parent}")
    title = title_of(options.run, run_dirs)
    if kind == "html":
        from dtrain.report.page import write

        size = write(run_dirs, file, f"{title} · dtrain report")
    else:
        from dtrain.report.picture import draw

        size = draw(run_dirs, file, title, kind)
    runs = "1 run" if len(run_dirs) == 1 else f"{len(run_dirs)} runs"
    say(stdout_console(), (short_path(file), "bold"), f"  {runs}, {size / 1000:,.0f} kB")
    return 0


def find_runs(names: Sequence[str]) -> list[Path]:
    """Return the folders of all these runs, each once; a folder that is no run itself stands for the runs below it."""
    found: dict[str, Path] = {}
    for word in names:
        folder = Path(word).expanduser()
        inside = list(run_folders(folder)) if word != "latest" and folder.is_dir() else []
        for run in inside or [find_run(word)]:
            found.setdefault(os.path.abspath(run), run.absolute())
    if len(found) > MOST_RUNS:
        fix = f"name fewer than {MOST_RUNS + 1}, or the folder of one sweep"
        raise ValueError(f"{len(found)} runs: more than a page can show\n  fix: {fix}")
    return list(found.values())


def format_of(asked: str | None, output: str | None) -> str:
    """The format that was asked for, or the one that the file's name says."""
    ending = Path(output).suffix[1:].lower() if output else ""
    if asked and ending in FORMATS and asked != ending:
        raise ValueError(f"--format={asked}: but --output={output} ends with .{ending}\n  fix: leave out --format")
    return asked or (ending if ending in FORMATS else "html")


def default_file(names: Sequence[str], run_dirs: Sequence[Path], kind: str) -> Path:
    """report.html inside the run or the sweep's folder; in the current folder for a choice of runs."""
    folder = run_dirs[0] if len(run_dirs) == 1 else Path(names[0]).expanduser() if len(names) == 1 else Path()
    return folder / f"report.{kind}"


def title_of(names: Sequence[str], run_dirs: Sequence[Path]) -> str:
    if len(run_dirs) == 1:
        return hide(clean(run_name(run_dirs[0])))
    shared = Path(names[0]).resolve().name + ", " if len(names) == 1 else ""
    return hide(clean(f"{shared}{len(run_dirs)} runs"))
