"""Compare runs: the settings that differ, and the results, one column per run."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dtrain.runs.folder import read_json
from dtrain.runs.record import load
from dtrain.ui.console import say, stdout_console
from dtrain.ui.tables import COLUMNS, OWN_METRICS, cell, own_columns, print_table
from dtrain.util.format import as_dict, clean, short_path

if TYPE_CHECKING:
    from rich.console import Console

# of a comparison: what every run has anew, or what others say; model and so on are among the settings, if they differ
NOT_COMPARED = {"_target_", "_partial_", "name", "resume", "resume_allow", "fork", "tags", "trust", "dry_run", "force"}
IN_SETTINGS = ("path", "name", "started", "model", "strategy", "precision")


def typed_keys(run_dir: Path) -> set[str]:
    """Return the names of the settings that were given in the launches of a run."""
    launches = read_json(run_dir / "launch.json").get("launches")
    lists = [as_dict(one).get("overrides") for one in launches] if isinstance(launches, list) else []
    return {str(word).lstrip("+~").partition("=")[0] for words in lists if isinstance(words, list) for word in words}


def compare(run_dirs: Sequence[Path]) -> dict[str, Any]:
    """Return the settings that differ between the runs, and their results: lists in the order of the runs.

    Of two options of a group, such as optim=adamw and sgd, the settings that only one of them has are left out, unless
    they were given.
    {"runs": [path, …], "settings": {key: [value, …]}, "results": {key: [value, …]}, "unreadable": [path, …]};
    a missing setting is None.
    """
    from dtrain.config.run_file import flat_config  # imported late: only comparisons need it

    dirs = [Path(d) for d in run_dirs]
    configs = [flat_config(d) for d in dirs]
    readable = [c for c in configs if c is not None]
    missing = object()
    settings: dict[str, list[Any]] = {}
    keys = dict.fromkeys(key for config in readable for key in config)
    # By text, because True == 1 and a list is not hashable.
    texts = {key: [repr(v) if (v := c.get(key, missing)) is not missing else "" for c in readable] for key in keys}
    differing = [key for key in keys if len(set(texts[key])) > 1]
    given = set().union(*map(typed_keys, dirs))
    others = {key.partition(".")[2] for key in differing if key.startswith("choices.")}  # groups with other options
    for key in sorted(differing, key=lambda key: not key.startswith("choices.")):
        name = key.removeprefix("choices.")
        of_option = key.partition(".")[0] in others and "" in texts[key] and key not in given
        if not (of_option or key.startswith("choices.recipe") or set(key.split(".")) & NOT_COMPARED):
            settings[name] = [None if c is None else c.get(key) for c in configs]
    runs = [record.row() for record in load(dirs)[0]]
    results = {key: [run[key] for run in runs] for key in COLUMNS if key not in IN_SETTINGS}
    results |= {key: [run.get(OWN_METRICS, {}).get(key) for run in runs] for key in own_columns(runs)}
    return {
        "runs": [run["path"] for run in runs],
        "settings": settings,
        "results": {key: values for key, values in results.items() if any(v is not None for v in values)},
        "unreadable": [str(d) for d, config in zip(dirs, configs, strict=True) if config is None],
    }


def print_compare(run_dirs: Sequence[Path], console: Console | None = None) -> None:
    """Print the settings that differ and the results, one column per run."""
    console = console or stdout_console()
    data = compare(run_dirs)
    # By position, because two runs may have the same name.
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
    """Return the runs' paths without their common parent folders."""
    common = os.path.commonpath([os.path.dirname(os.path.abspath(p)) for p in paths])
    return [os.path.relpath(os.path.abspath(p), common) for p in paths]
