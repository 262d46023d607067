"""Find a run folder by name."""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from dtrain.runs.record import ROOTS, all_runs, run_folders, run_name
from dtrain.util.format import short_path

START = "start one with `python launch.py`, or change to the folder where you did"


def no_run(example: str, roots: Sequence[str | Path] = ROOTS) -> ValueError:
    """Return the error of a command without a run. example: the command for the newest run."""
    runs = all_runs(roots)
    where = " and ".join(f"{root}/" for root in roots)
    fix = f"name a run: {example}; the newest are{_bullets(runs)}" if runs else START
    here = "" if runs else f", and none is under {where} of {Path.cwd()}"
    return ValueError(f"run: none is given{here}\n  fix: {fix}")


def find_run(word: str, roots: Sequence[str | Path] = ROOTS) -> Path:
    """Find the run folder for a path, for `latest`, or for a unique part of its name."""
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
            f"  fix: {START}"
        )
    if word == "latest":
        return runs[0].absolute()
    text = word.rstrip("/")
    # The strictest rule with a match decides: `3-lr=0.1` is not ambiguous because of `13-lr=0.1`.
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
                f"run {word!r}: {len(matches)} runs have that in their name; it must match exactly one\n"
                f"  fix: give more of the path; newest first:{_bullets(matches)}"
            )
    names = {name: run for run in runs for name in (str(run), run.name, run_name(run))}
    near = [names[name] for name in difflib.get_close_matches(text, names, n=5, cutoff=0.5)]
    hint = f"did you mean{_bullets(dict.fromkeys(near))}" if near else f"the newest are{_bullets(runs)}"
    if difflib.get_close_matches(text, ["latest"], cutoff=0.7):
        hint = f"did you mean latest, which is {short_path(runs[0])}?"
    raise ValueError(
        f"run {word!r}: no such folder, and none of the {len(runs)} runs under {where} has that in its name\n"
        f"  fix: {hint}"
    )


def _bullets(paths: Any, most: int = 5) -> str:
    paths = list(paths)
    more = [f"… and {len(paths) - most} more; `dtrain runs` lists them"] if len(paths) > most else []
    return "".join(f"\n    {line}" for line in [short_path(p) for p in paths[:most]] + more)
