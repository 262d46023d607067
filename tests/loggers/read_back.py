"""What a tracker has of a run, read by the tracker's own library: metric → [(step, value), …], as stored."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

from dtrain.loggers.tracker import RunFacts, numbers
from dtrain.loggers.wandb import blocks, history

Points = dict[str, list[tuple[int, float]]]


def truth(run: Path) -> Points:
    """metrics.jsonl."""
    found: Points = {}
    for line in map(json.loads, (run / "metrics.jsonl").read_text().splitlines()):
        step = line.pop("step")
        step = line.get("save_step", step)
        line.pop("time", None)
        for name, value in numbers(line).items():
            found.setdefault(name, []).append((step, value))
    return found


def of_csv(run: Path) -> Points:
    found: Points = {}
    with open(run / "metrics.csv", newline="") as file:
        for row in csv.DictReader(file, restval=""):
            for name, text in row.items():
                if name != "step" and text:
                    found.setdefault(name, []).append((int(row["step"]), float(text)))
    return found


def of_tensorboard(run: Path) -> Points:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    read = EventAccumulator(str(run / "tensorboard"), size_guidance={"scalars": 0})
    read.Reload()
    return {tag: [(e.step, e.value) for e in read.Scalars(tag)] for tag in read.Tags()["scalars"]}


def of_wandb(run: Path) -> Points:
    """Every offline file of the run: W&B joins them by the run's id."""
    found: Points = {}
    for path in sorted((run / "wandb").glob("offline-run-*/*.wandb")):
        for step, values in history(path):
            for name, text in values.items():
                if not name.startswith("_"):
                    found.setdefault(name, []).append((step, json.loads(text)))
    return found


def wandb_summary(run: Path) -> dict[str, Any]:
    from wandb.proto import wandb_internal_pb2

    found, kind = dict[str, Any](), wandb_internal_pb2.Record  # type: ignore[attr-defined]
    for path in sorted((run / "wandb").glob("offline-run-*/*.wandb")):
        for item in (item for data in blocks(path) for item in kind.FromString(data).summary.update):
            found[item.key or ".".join(item.nested_key)] = json.loads(item.value_json)
    return found


def of_trackio(run: Path, folder: Path, project: str = "dtrain") -> Points:
    from trackio import sqlite_storage

    sqlite_storage.TRACKIO_DIR = folder  # it was read from the environment when the module was imported
    facts, found = RunFacts.read(run), dict[str, list[tuple[int, float]]]()
    for row in sqlite_storage.SQLiteStorage.get_logs(project, facts.unique_name, run_id=facts.id):
        for name, value in row.items():
            if name not in ("step", "timestamp"):
                found.setdefault(name, []).append((row["step"], value))
    return found


def mlflow_run(run: Path, uri: str) -> tuple[Any, Any]:
    from mlflow.tracking import MlflowClient

    client = MlflowClient(uri)
    experiment = client.get_experiment_by_name("dtrain")
    assert experiment is not None
    (found,) = client.search_runs([experiment.experiment_id], f"tags.`dtrain.id` = '{RunFacts.read(run).id}'")
    return client, found


def of_mlflow(run: Path, uri: str) -> Points:
    client, found = mlflow_run(run, uri)
    return {
        name: [(m.step, m.value) for m in client.get_metric_history(found.info.run_id, name)]
        for name in found.data.metrics
    }
