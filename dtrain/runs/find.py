"""Find a run folder by name, and one of its checkpoints: RUN, RUN@STEP, RUN@best."""

from __future__ import annotations

import contextlib
import difflib
import re
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from dtrain.config.run_file import flat_config
from dtrain.errors import bad
from dtrain.runs.best import best_of, mode_of, saved_metrics
from dtrain.runs.folder import checkpoints
from dtrain.runs.record import ROOTS, all_runs, run_folders, run_name
from dtrain.util.format import argument, counted, short_path

START = "start one with `dtrain launch`, or change to the folder where you did"


def no_run(example: str, roots: Sequence[str | Path] = ROOTS) -> ValueError:
    """Return the error of a command without a run. example: the command for the newest run."""
    runs = all_runs(roots)
    where = " and ".join(f"{root}/" for root in roots)
    fix = f"name a run: {example}; the newest are{_bullets(runs)}" if runs else START
    here = "" if runs else f", and none is under {where} of {Path.cwd()}"
    return ValueError(f"run: none is given{here}\n  fix: {fix}")


def find_run(word: str, roots: Sequence[str | Path] = ROOTS, setting: str = "run") -> Path:
    """Find the run folder for a path, for `latest`, or for a unique part of its name. setting: for messages."""
    path = Path(word).expanduser()
    if word != "latest" and (path / "launch.json").is_file():
        return path.absolute()
    inside = list(run_folders(path)) if word != "latest" and path.is_dir() else []
    if inside:
        raise ValueError(
            f"run {word!r}: the folder holds {counted(len(inside), 'run')} and is not one itself\n"
            f"  fix: name one of them:{_bullets(inside)}"
        )
    step = re.fullmatch(r"step-0*(\d+)", path.name)
    if step and path.is_dir() and (path.absolute().parents[1] / "launch.json").is_file():
        run = f"{short_path(path.absolute().parents[1])}@{step[1]}"
        fix = run if setting == "run" else f"{setting}={run}"
        raise ValueError(f"{argument(setting, word)}: is the folder of a checkpoint, not of a run\n  fix: {fix}")
    runs = all_runs(roots)
    where = " and ".join(f"{root}/" for root in roots)
    if not runs:
        there = "the folder is no run, it has no launch.json" if path.is_dir() else "there is no such run"
        fix = (
            f"leave out {setting}=, or run this in the folder that has outputs/"
            if setting in ("resume", "fork")
            else START
        )
        what = f"run {word!r}" if setting == "run" else argument(setting, word)
        raise ValueError(f"{what}: {there}, and none is under {where} of {Path.cwd()}\n  fix: {fix}")
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
    if difflib.get_close_matches(text, ["latest"], cutoff=0.7) or text.lower() in ("true", "yes", "auto", "newest"):
        hint = f"did you mean latest, which is {short_path(runs[0])}?"
    raise ValueError(
        f"run {word!r}: no such folder, and none of {counted(len(runs), 'run')} under {where} has that in its name\n"
        f"  fix: {hint}"
    )


class At(NamedTuple):
    """A run and one of its checkpoints: that of a step, or the newest good one."""

    run_dir: Path
    step: int | None = None  # None: the newest good one

    def __str__(self) -> str:
        return f"{self.run_dir}@{self.step}" if self.step is not None else str(self.run_dir)


def find_checkpoint(word: str, roots: Sequence[str | Path] = ROOTS, setting: str = "run") -> At:
    """Find RUN, RUN@STEP or RUN@best, where RUN is all that `find_run` takes, for example latest@best.

    setting: its name in error messages. The checkpoint is there; only loading it verifies that it is intact.
    """
    name, at, which = word.rpartition("@")
    is_path = word != "latest" and (Path(word).expanduser() / "launch.json").is_file()
    if not at or "/" in which or is_path:
        return At(find_run(word, roots, setting))
    if not re.fullmatch(r"(step-)?\d{1,18}|best", which, re.ASCII):
        try:  # an @ in the name of the run
            return At(find_run(word, roots, setting))
        except ValueError:
            fix = _typed(setting, f"{name}@{_likely(name, which, roots)}")
            raise bad(setting, word, "after the @ comes a step, or best", fix) from None
    run_dir = find_run(name, roots, setting)
    kept = [path for path in checkpoints(run_dir / "checkpoints") if (path / "manifest.json").is_file()]
    if not kept:
        raise bad(setting, word, "the run has no checkpoint", "a run that has saved one; dtrain runs lists the runs")
    step = _best(run_dir, kept, word, setting) if which == "best" else int(which.removeprefix("step-"))
    steps = [int(path.name[5:]) for path in kept]
    if step not in steps:
        near = min(steps, key=lambda found: abs(found - step))
        rule = f"the run has no checkpoint of step {step}; it has {', '.join(map(str, sorted(steps)[-20:]))}"
        raise bad(setting, word, rule, _typed(setting, f"{name}@{near}"))
    return At(run_dir, step)


def _likely(name: str, which: str, roots: Sequence[str | Path]) -> str:
    """Return what was probably meant after the @: best, or the newest step of that run."""
    kept = []
    with contextlib.suppress(ValueError):
        kept = checkpoints(find_run(name, roots) / "checkpoints")
    if not kept or difflib.get_close_matches(which, ["best"], 1, 0.6):
        return "best"
    return str(int(kept[0].name[5:]))


def _best(run_dir: Path, kept: Sequence[Path], word: str, setting: str) -> int:
    """Return the step of the best checkpoint of a run that kept it."""
    settings, metrics = flat_config(run_dir) or {}, saved_metrics(kept)
    metric, name = settings.get("checkpoint.keep_best"), word.rpartition("@")[0]
    newest = _typed(setting, f"{name}@{int(kept[0].name[5:])}")
    if not isinstance(metric, str):
        found = best_of(metrics, "val_loss", "min")
        rule = "the run did not keep its best checkpoint (checkpoint.keep_best); others may have been better"
        lowest = f"{_typed(setting, f'{name}@{found}')}, of those kept the one with the lowest val_loss"
        raise bad(setting, word, rule, newest if found is None else lowest)
    step = best_of(metrics, metric, mode_of(metric, settings.get("checkpoint.best_mode")) or "min")
    if step is None:
        rule = f"no checkpoint has {metric} yet (checkpoint.keep_best)"
        raise bad(setting, word, rule, f"{newest}, or wait for an evaluation")
    return step


def _typed(setting: str, word: str) -> str:
    """Return what to type: an argument of a command, or a setting of `dtrain launch`."""
    return shlex.quote(word) if setting == "run" else argument(setting, word)


def _bullets(paths: Any, most: int = 5) -> str:
    paths = list(paths)
    more = [f"… and {len(paths) - most} more; `dtrain runs` lists them"] if len(paths) > most else []
    return "".join(f"\n    {line}" for line in [short_path(p) for p in paths[:most]] + more)
