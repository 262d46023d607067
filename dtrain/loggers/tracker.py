"""What a tracker gets: the facts of a run, and its metrics as rows. Imports no torch and no tracker."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from dtrain.config import run_file
from dtrain.config.files import flatten
from dtrain.config.redaction import hidden, redact
from dtrain.runs import environment
from dtrain.runs.folder import PLAN, last_launch, latest_checkpoint, read_json, read_summary
from dtrain.runs.record import run_name
from dtrain.util.format import as_dict

SYSTEM = "system/"  # the names of system metrics begin with it
REST = ""  # in Held: the step up to which a tracker has all metrics that are not listed; SYSTEM: the same for those
Held = dict[str, int]  # the newest step that a tracker has of each metric


class Row(NamedTuple):
    step: int
    time: float  # seconds since the epoch
    values: dict[str, float]


class Tracker(Protocol):
    """One option of conf/logger/. Each method may raise anything: the follower then opens the tracker again later."""

    mirrors: bool  # a local file that is written again from its start when metrics.jsonl is: always equal to it
    takes_system: bool  # whether it also gets the system metrics of the nodes
    is_remote: bool  # a server may never answer; files and databases are given time to be complete
    every: int  # of the training steps it gets those that this number divides, and the last

    def open(self, run: RunFacts) -> Held:
        """Start or continue the tracker's run of this run folder; return what it has already."""

    def log(self, rows: list[Row]) -> None:
        """Store rows that it does not have. They have arrived when this returns, or when `finish` does."""

    def finish(self, run: RunFacts) -> None:
        """Store the summary, and close the tracker's run. A resumed run opens it again."""


@dataclass(frozen=True)
class RunFacts:
    """What a tracker shows beside the metrics. Nothing in it is a secret."""

    run_dir: Path
    id: str  # of the run folder; also the tracker's id of the run, so that a resumed run continues there
    name: str
    group: str | None  # the folder of the sweep that the run belongs to
    config: dict[str, Any]  # as in config.yaml, redacted
    tags: dict[str, str]
    plan: dict[str, Any]
    summary: dict[str, Any]

    @classmethod
    def read(cls, run_dir: Path) -> RunFacts:
        run_dir = run_dir.absolute()
        launches, summary = read_json(run_dir / "launch.json"), read_summary(run_dir)
        launch, config = last_launch(launches), redact(dict(run_file.read_run(run_dir)))
        in_sweep = (run_dir.parent / "sweep.json").is_file()
        given = str(launches.get("id"))
        tags = {f"choices.{group}": option for group, option in as_dict(config.pop("choices", None)).items() if option}
        checkpoint = latest_checkpoint(run_dir)
        tags |= {
            "run_dir": run_dir, "command": launches.get("command"), "host": launch.get("host"),
            "git_commit": environment.commit(launches), "sweep": run_dir.parent if in_sweep else None,
            "checkpoint": checkpoint,
        }  # fmt: skip
        return cls(
            run_dir,
            given if re.fullmatch(r"[0-9a-f]{8,64}", given) else re.sub(r"\W+", "-", str(run_dir))[-64:].strip("-"),
            str(config.get("name") or run_name(run_dir)) if not in_sweep else run_dir.name,
            run_dir.parent.name if in_sweep else None,
            config,
            {key: str(value) for key, value in hidden({k: str(v) for k, v in tags.items() if v}).items()},
            read_json(run_dir / PLAN),
            hidden(summary),
        )

    @property
    def unique_name(self) -> str:
        """For trackers that tell runs apart by their names."""
        return f"{self.name}-{self.id[:8]}"

    @property
    def status(self) -> str:
        return str(self.summary.get("status", "running"))

    def settings(self) -> dict[str, Any]:
        """The configuration by dotted names."""
        return {key: value for key, value in flatten(self.config).items() if not key.endswith("_target_")}


def numbers(values: dict[str, Any]) -> dict[str, float]:
    """Return the finite numbers of a line: NaN and Inf are null in metrics.jsonl, and trackers draw no texts."""
    return {key: value for key, value in values.items() if type(value) in (int, float) and value - value == 0}


class BySteps:
    """Joins the rows of a step to one, for trackers that have one row a step. The newest step may still get more."""

    def __init__(self) -> None:
        self.waiting: Row | None = None

    def add(self, rows: Iterable[Row]) -> Iterator[Row]:
        """Yield each step that is complete. A row that comes too late for its step is added to the next."""
        for row in rows:
            if self.waiting and row.step > self.waiting.step:
                yield self.waiting
                self.waiting = None
            if self.waiting is None:
                self.waiting = row
            else:
                self.waiting = self.waiting._replace(values=self.waiting.values | row.values)

    def rest(self) -> list[Row]:
        """Return the newest step, which gets no more rows."""
        rest, self.waiting = [self.waiting] if self.waiting else [], None
        return rest
