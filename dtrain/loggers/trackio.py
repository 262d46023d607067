"""Trackio: its SQLite store on this machine, or its own server."""

from __future__ import annotations

import os
from datetime import UTC, datetime
from typing import Any

from dtrain.loggers.tracker import REST, SYSTEM, Held, Row, RunFacts

BATCH = 5000  # rows of one transaction or request


class Trackio:
    """Each row has an id made from its step, and the store ignores an id that it has: none arrives twice."""

    mirrors, takes_system = False, True

    def __init__(self, project: str = "dtrain", server_url: str | None = None, every: int = 1) -> None:
        self.project, self.url, self.every = project, server_url or os.environ.get("TRACKIO_SERVER_URL"), every
        self.is_remote = bool(self.url)

    def open(self, run: RunFacts) -> Held:
        os.environ.setdefault("HF_HUB_OFFLINE", "1")  # the local store asks no hub
        self.run, self.last = run, list[Row]()
        self.config: dict[str, Any] | None = {**run.settings(), **run.tags, "_Group": run.group}
        if self.url:
            from trackio.remote_client import RemoteClient

            token = os.environ.get("TRACKIO_WRITE_TOKEN")
            self.server: Any = RemoteClient(self.url, write_token=token, httpx_kwargs={"timeout": 10})
            about = self.server.predict(api_name="/get_run_summary", **self._run())
            newest = about.get("last_step")
        else:
            from trackio.sqlite_storage import SQLiteStorage

            self.server, self.store = None, SQLiteStorage
            newest = SQLiteStorage.get_max_step_for_run(**self._run())
        return {REST: -1 if newest is None else int(newest) - 1, SYSTEM: -1}  # the newest step may lack a row

    def log(self, rows: list[Row]) -> None:
        for i in range(0, len(rows), BATCH):
            ours, system = list[Row](), list[Row]()
            for row in rows[i : i + BATCH]:
                (system if is_system(row) else ours).append(row)
            self._send(ours)
            self._send_system(system)

    def finish(self, run: RunFacts) -> None:
        """The store has no summary: it becomes a part of the configuration, sent along with the last row again."""
        summary = {f"summary.{key}": value for key, value in run.summary.items()}
        self.config = {**run.settings(), **run.tags, **summary, "plan": run.plan, "_Group": run.group}
        self._send(self.last)

    def _run(self) -> dict[str, Any]:
        return {"project": self.project, "run": self.run.unique_name, "run_id": self.run.id}

    def _send(self, rows: list[Row]) -> None:
        if not rows:
            return
        self.last = rows[-1:]
        ids = [f"{self.run.id}-{row.step}-{next(iter(row.values))}" for row in rows]
        if self.server:
            entries = [
                {**self._run(), "metrics": row.values, "step": row.step, "config": self.config, "log_id": id}
                for row, id in zip(rows, ids, strict=True)
            ]
            for entry in entries[1:]:
                del entry["config"]
            self.server.predict(api_name="/bulk_log", logs=entries, hf_token=None)
        else:
            values, steps = [row.values for row in rows], [row.step for row in rows]
            times = [as_text(row.time) for row in rows]
            self.store.bulk_log(
                metrics_list=values, steps=steps, timestamps=times, config=self.config, log_ids=ids, **self._run()
            )
        self.config = None

    def _send_system(self, rows: list[Row]) -> None:
        if not rows:
            return
        ids = [f"{self.run.id}-{row.time}-{next(iter(row.values))}" for row in rows]
        values, times = [row.values for row in rows], [as_text(row.time) for row in rows]
        if self.server:
            entries = [
                {**self._run(), "metrics": value, "timestamp": time, "log_id": id}
                for value, time, id in zip(values, times, ids, strict=True)
            ]
            self.server.predict(api_name="/bulk_log_system", logs=entries, hf_token=None)
        else:
            self.store.bulk_log_system(metrics_list=values, timestamps=times, log_ids=ids, **self._run())


def is_system(row: Row) -> bool:
    return next(iter(row.values)).startswith(SYSTEM)


def as_text(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).isoformat()
