"""MLflow: a server, or a database that its library opens."""

from __future__ import annotations

import json
import os
import re
from typing import Any

from dtrain.errors import bad
from dtrain.loggers.tracker import Held, Row, RunFacts

BATCH, PARAMS = 1000, 100  # MLflow's limits for one request
LONGEST = 5000  # of a value; MLflow's limits are 6000 for a parameter and 8000 for a tag
ID = "dtrain.id"  # tag by which the MLflow run of a run folder is found
HALF_MADE = "table .* already exists|out-of-date database schema"
STATUS = {"done": "FINISHED", "failed": "FAILED", "preempted": "KILLED"}


class Mlflow:
    mirrors, takes_system = False, True

    def __init__(self, uri: str | None = None, experiment: str = "dtrain", every: int = 1) -> None:
        self.uri, self.experiment, self.every = uri, experiment, every
        self.is_remote = (uri or os.environ.get("MLFLOW_TRACKING_URI", "")).startswith("http")

    def open(self, run: RunFacts) -> Held:
        # The follower tries again itself, and first asks what has arrived.
        os.environ.setdefault("MLFLOW_HTTP_REQUEST_TIMEOUT", "10")
        os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
        from mlflow.entities import Param
        from mlflow.tracking import MlflowClient

        try:
            self.client = MlflowClient(self.uri)
            experiment = self._experiment()
        except Exception as error:
            if self.is_remote or not re.search(HALF_MADE, str(error)):
                raise
            rule = "this database is not complete: its creation was cut off, or another version of MLflow made it"
            fix = f"mlflow db upgrade {self.uri}; if that fails, delete it: `dtrain log` sends its runs again"
            raise bad("logger.mlflow.uri", self.uri, rule, fix) from error
        found = self.client.search_runs([experiment], f"tags.`{ID}` = '{run.id}'", max_results=1)
        tags = {ID: run.id, **({"mlflow.note.content": run.tags["command"]} if "command" in run.tags else {})}
        created = found[0] if found else self.client.create_run(experiment, tags=tags, run_name=run.name)
        self.run_id = created.info.run_id
        if found:
            self.client.update_run(self.run_id, status="RUNNING")
        self._set_tags({**run.tags, "group": run.group})
        # a parameter cannot be changed: that of the first attempt stays
        new = {k: shown(v) for k, v in run.settings().items() if k not in created.data.params and shown(v)}
        params = [Param(key, value) for key, value in new.items()]
        for i in range(0, len(params), PARAMS):
            self.client.log_batch(self.run_id, params=params[i : i + PARAMS])
        return {metric.key: metric.step for metric in created.data.to_proto().metrics}

    def log(self, rows: list[Row]) -> None:
        from mlflow.entities import Metric

        metrics = [
            Metric(key, value, int(row.time * 1000), row.step) for row in rows for key, value in row.values.items()
        ]
        for i in range(0, len(metrics), BATCH):
            self.client.log_batch(self.run_id, metrics=metrics[i : i + BATCH], synchronous=True)

    def finish(self, run: RunFacts) -> None:
        self._set_tags({**run.tags, **{f"summary.{key}": value for key, value in run.summary.items()}})
        self._set_tags({f"plan.{key}": value for key, value in run.plan.items()})
        if run.status in STATUS:
            self.client.set_terminated(self.run_id, STATUS[run.status])

    def _experiment(self) -> str:
        from mlflow.exceptions import MlflowException

        found = self.client.get_experiment_by_name(self.experiment)
        if found is None:
            try:
                return str(self.client.create_experiment(self.experiment))
            except MlflowException:  # another run created it just now
                found = self.client.get_experiment_by_name(self.experiment)
                if found is None:
                    raise
        return str(found.experiment_id)

    def _set_tags(self, values: dict[str, Any]) -> None:
        from mlflow.entities import RunTag

        tags = [RunTag(key, shown(value)) for key, value in values.items() if value is not None]
        for i in range(0, len(tags), PARAMS):
            self.client.log_batch(self.run_id, tags=tags[i : i + PARAMS])


def shown(value: Any) -> str:
    return (value if isinstance(value, str) else json.dumps(value))[:LONGEST]
