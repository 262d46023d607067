"""`dtrain.load(RUN)`: a run's configuration, metrics, summary and plots, for notebooks and scripts.

Only reads the run folder, and nothing in it is executed. pandas and matplotlib come with `dtrain[notebook]`, and are
imported when they are needed.
"""

from __future__ import annotations

import html
import importlib
import json
import math
import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, overload

from dtrain.config import run_file
from dtrain.config.build import allowed
from dtrain.config.files import TARGET
from dtrain.errors import bad
from dtrain.report.why import diagnose
from dtrain.runs.causes import fixes_for_script
from dtrain.runs.find import find_checkpoint, find_run
from dtrain.runs.folder import PLAN, read_json, read_summary
from dtrain.runs.live import sampled
from dtrain.runs.metrics import gpus_of, rows, system_files
from dtrain.runs.record import Record, run_folders
from dtrain.runs.record import load as load_records
from dtrain.ui.comparison import compare
from dtrain.ui.sweep_table import point
from dtrain.ui.tables import COLUMNS, cell
from dtrain.util.format import clean, number, short_path

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from pandas import DataFrame
    from torch import nn

SHOWN = ("status", "model", "strategy", "world_size", "steps", "train_loss", "val_loss", "tokens_per_s", "wall_s")


def load(run: str | Path = "latest") -> LoadedRun | LoadedRuns:
    """Open a run by its folder, a part of its name, or `latest`; a folder of several runs gives a list of them."""
    folder = Path(run).expanduser()
    if str(run) != "latest" and not (folder / "launch.json").is_file():
        inside = sorted(run_folders(folder), key=point) if folder.is_dir() else []
        if inside:
            return LoadedRuns([LoadedRun(path.absolute()) for path in inside])
    with fixes_for_script():
        return LoadedRun(find_run(str(run)))


def step_of(run_dir: Path, at: int | str | None, call: str) -> int | None:
    """Return the step of a checkpoint; None: the newest one. call: the method, for messages in Python's spelling."""
    try:
        return None if at is None else find_checkpoint(f"{run_dir}@{at}").step
    except ValueError as error:
        rule, _, fix = str(error).removeprefix(f"run={run_dir}@{at}: ").partition("\n  fix: ")
        fix = fix.replace("'", "").replace(f"{run_dir}@best", f'{call}(at="best")')
        fix = re.sub(rf"{re.escape(str(run_dir))}@(\d+)", rf"{call}(at=\1)", fix)
        raise ValueError(f"{call}(at={json.dumps(at, default=str)}): {rule}\n  fix: {fix}") from None


class LoadedRun:
    """A run folder. Each attribute reads the files again, so it is current while the run trains."""

    def __init__(self, run_dir: Path) -> None:
        self.run_dir = run_dir

    @property
    def name(self) -> str:
        return str(self._record.row()["name"])

    @property
    def config(self) -> run_file.Settings:
        """The resolved configuration; `run.config.train.steps` and `run.config["train"]["steps"]` both work."""
        return run_file.load(self.run_dir)

    @property
    def summary(self) -> dict[str, Any]:
        """summary.json; while the run trains, with its newest metrics."""
        return read_summary(self.run_dir)

    @property
    def plan(self) -> dict[str, Any]:
        """The planner's prediction (plan.json)."""
        return read_json(self.run_dir / PLAN)

    @property
    def status(self) -> str:
        return load_records([self.run_dir])[0][0].status

    @property
    def metrics(self) -> DataFrame:
        """metrics.jsonl as a frame with one row per step: training and evaluation in the same row.

        A value that was not finite is NaN. The times of each rank (lists in the file) are left out.
        """
        with fixes_for_script():
            pandas = _library("pandas", "metrics")
        steps: dict[int, dict[str, Any]] = {}
        for row in rows(self.run_dir / "metrics.jsonl"):
            if isinstance(row.get("step"), int):
                steps.setdefault(row["step"], {}).update(
                    {k: v for k, v in row.items() if not isinstance(v, list | dict)}
                )
        frame = pandas.DataFrame(steps.values()).drop(columns="step", errors="ignore")
        frame.index = pandas.Index(list(steps), name="step")
        return frame.dropna(axis="columns", how="all").sort_index()

    @property
    def system(self) -> DataFrame:
        """System metrics of all nodes by time; a GPU's are in columns such as `gpu0_power_w`."""
        pandas = _library("pandas", "system")
        samples = []
        for node, path in system_files(self.run_dir).items():
            for row in rows(path):
                if number(row.get("time")) is not None:
                    samples.append({"node": node, **_flat(row)})
        frame = pandas.DataFrame(samples, columns=None if samples else ["node", "time"])
        frame["time"] = pandas.to_datetime(frame["time"], unit="s", utc=True, errors="coerce")
        return frame.set_index("time").sort_index()

    def model(self, at: int | str | None = None, trust: Iterable[str] = ()) -> nn.Module:
        """Return the trained model as its own class or function makes it, on the CPU, in evaluation mode.

        at: the step of another checkpoint than the newest, or "best" (checkpoint.keep_best). trust: your own modules
        that make it; a run folder cannot say that they may run.
        """
        from dtrain.inference.sample import load_plain  # imports torch

        with fixes_for_script():
            names, target = [trust] if isinstance(trust, str) else list(trust), str(self.config.model[TARGET])
            if not allowed(target, names):
                rule = f"{target} is your own code, and a run folder cannot say that it may run"
                raise bad(
                    "trust", names, rule, f'model(trust=["{target.rpartition(".")[0]}"]), if that module is yours'
                )
            return load_plain(self.run_dir, names, step_of(self.run_dir, at, "model"))

    def why(self) -> str:
        """Why the run ended, as `dtrain why` says it."""
        return diagnose(load_records([self.run_dir], ask_all=True)[0][0]).paragraph

    def plot(self, *names: str, log: bool = False) -> Figure:
        """Plot metrics by step, one below the other; the loss has the validation loss beside it."""
        return _plot([self], names or ("loss",), log)

    @property
    def _record(self) -> Record:
        return Record.read(self.run_dir)

    def __repr__(self) -> str:
        return f"<run {clean(self.name)}: {clean(self.status)}, {short_path(self.run_dir)}>"

    def _repr_html_(self) -> str:
        row = self._record.row() | {"status": self.status}
        cells = [("run", self.name), *((COLUMNS[key][0], cell(key, row[key])) for key in SHOWN)]
        cells += [("folder", short_path(self.run_dir))]
        table = "".join(f"<tr><th>{_safe(a)}</th><td>{_safe(b)}</td></tr>" for a, b in cells if b != "-")
        return f"<table>{table}</table>{_spark(sampled(self.run_dir / 'metrics.jsonl', 'loss'))}"


class LoadedRuns(Sequence[LoadedRun]):
    """Several runs, such as the points of a sweep."""

    def __init__(self, runs: list[LoadedRun]) -> None:
        self._runs = runs

    @overload
    def __getitem__(self, index: int) -> LoadedRun: ...

    @overload
    def __getitem__(self, index: slice) -> LoadedRuns: ...

    def __getitem__(self, index: int | slice) -> LoadedRun | LoadedRuns:
        return LoadedRuns(self._runs[index]) if isinstance(index, slice) else self._runs[index]

    def __len__(self) -> int:
        return len(self._runs)

    def __iter__(self) -> Iterator[LoadedRun]:
        return iter(self._runs)

    def table(self) -> DataFrame:
        """One row per run: the settings that differ between the runs, then the results."""
        pandas = _library("pandas", "table()")
        data = compare([run.run_dir for run in self])
        frame = pandas.DataFrame({**data["settings"], **data["results"]})
        frame.index = pandas.Index([run.run_dir.name for run in self], name="run")
        return frame

    def plot(self, *names: str, log: bool = False) -> Figure:
        """Plot metrics of all runs in the same axes."""
        return _plot(list(self), names or ("loss",), log)

    def __repr__(self) -> str:
        names = [clean(run.name) for run in self._runs[:8]] + ["…"] * (len(self) > 8)
        return f"<{len(self)} runs: {', '.join(names)}>"

    def _repr_html_(self) -> str:
        records = load_records([run.run_dir for run in self])[0]
        data = [record.row() for record in records]
        keys = [key for key in SHOWN if any(row[key] is not None for row in data)]
        head = "".join(f"<th>{_safe(name)}</th>" for name in ("run", *(COLUMNS[key][0] for key in keys)))
        body = ""
        for record, row in zip(records, data, strict=True):
            texts = [record.run_dir.name, *(cell(key, row[key]) for key in keys)]
            body += "<tr>" + "".join(f"<td>{_safe(text)}</td>" for text in texts) + "</tr>"
        return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"


def _plot(runs: list[LoadedRun], names: Sequence[str], log: bool) -> Figure:
    _library("matplotlib", "plot()")
    from matplotlib import pyplot

    frames = [run.metrics for run in runs]
    known = list(dict.fromkeys(name for frame in frames for name in frame.columns))
    for name in names:
        if name not in known:
            raise ValueError(f"plot({name!r}): there is no such metric\n  fix: use one of {', '.join(map(str, known))}")
    figure, axes = pyplot.subplots(len(names), 1, figsize=(8, 3 * len(names)), sharex=True, squeeze=False)
    for axis, name in zip(axes[:, 0], names, strict=True):
        for i, (run, frame) in enumerate(zip(runs, frames, strict=True)):
            label = "" if len(runs) == 1 else f"{_without_formula(run.run_dir.name)} "
            for column, style in ((name, "-"), *([("val_loss", "--")] if name == "loss" else [])):
                if column in frame:
                    values = frame[column].dropna()
                    marker = "o" if column.startswith("val_") else None
                    what = _without_formula(column) if len(runs) == 1 or column != name else ""
                    axis.plot(values.index, values, style, color=f"C{i if len(runs) > 1 else int(style == '--')}",
                              marker=marker, markersize=3, linewidth=1.2, label=(label + what).strip())  # fmt: skip
        axis.set_ylabel(_without_formula(name))
        axis.grid(alpha=0.3)
        if log:
            axis.set_yscale("log")
        if len(axis.lines) > 1:
            axis.legend(frameon=False, fontsize="small")
    axes[-1, 0].set_xlabel("step")
    axes[0, 0].set_title(_without_formula(runs[0].name) if len(runs) == 1 else f"{len(runs)} runs")
    figure.tight_layout()
    pyplot.close(figure)  # a notebook shows the returned figure; an open one would be shown twice
    return figure


def _library(name: str, what: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError:
        raise ModuleNotFoundError(
            f"dtrain.load(…).{what}: {name} is not installed\n  fix: pip install 'dtrain[notebook]'", name=name
        ) from None


def _flat(sample: dict[str, Any]) -> dict[str, Any]:
    """Return a line of system metrics with its GPUs in columns of their own."""
    flat = {key: value for key, value in sample.items() if key != "gpus"}
    for i, gpu in enumerate(gpus_of(sample)):
        for key, value in gpu.items():
            text = ", ".join(map(str, value)) if isinstance(value, list) else value
            flat[f"gpu{gpu.get('index', i)}_{key}"] = text
    return flat


def _without_formula(text: str) -> str:
    """Untrusted text for a plot: `$` would start a formula."""
    return clean(str(text)).replace("$", r"\$")


def _safe(text: object) -> str:
    return html.escape(clean(str(text)))


def _spark(values: list[float], width: int = 240, height: int = 40) -> str:
    """A small picture of the loss."""
    found = [value for value in values if math.isfinite(value)]
    if len(found) < 2:
        return ""
    low, high = min(found), max(found)
    scale = (height - 4) / ((high - low) or 1)
    places = (f"{i * width / (len(found) - 1):.1f},{2 + (high - value) * scale:.1f}" for i, value in enumerate(found))
    line = f'<polyline points="{" ".join(places)}" fill="none" stroke="#3b82c4" stroke-width="1.5"/>'
    return f'<svg width="{width}" height="{height}" role="img" aria-label="loss">{line}</svg>'
