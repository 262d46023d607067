"""The table of a sweep: one line per point, with the overrides that not all points have."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dtrain.runs.causes import one_line
from dtrain.runs.folder import read_json
from dtrain.runs.record import ERRORS, RESULTS, load
from dtrain.runs.search_journal import JOURNAL
from dtrain.ui.console import say, stdout_console
from dtrain.ui.tables import COLUMNS, cell, own_cells, own_columns, print_table, say_problem, steps_text
from dtrain.util.format import as_dict, clean, number, shell_path

if TYPE_CHECKING:
    from rich.console import Console

SWEEP = "sweep.json"  # in the folder of a sweep: its command and its points
MOST_WAITING = 10  # points of a sweep that are listed though they have not begun
ENDED_EARLY = ("preempted", "cancelled", "failed", "died", "paused", "replaced")


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
