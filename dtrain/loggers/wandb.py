"""Weights & Biases. The key comes from the environment (WANDB_API_KEY), never from a setting."""

from __future__ import annotations

import os
import shutil
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

from dtrain.loggers.tracker import REST, BySteps, Held, Row, RunFacts

INIT_S = 10  # W&B waits this long for its server; the follower tries again later
MANY = 200  # rows, as when a run is sent later
BLOCK, HEADER, FIRST_BYTES = 32768, 7, b":W&B"


class Wandb:
    """W&B has one row a step and takes steps in order, so that a step is sent when the next one begins."""

    mirrors, takes_system = False, True

    def __init__(
        self, project: str = "dtrain", mode: Literal["online", "offline", "disabled"] = "online", every: int = 1
    ) -> None:
        if mode == "online" and os.environ.get("WANDB_MODE") in ("offline", "disabled", "dryrun"):
            mode = "disabled" if os.environ["WANDB_MODE"] == "disabled" else "offline"
        self.project, self.mode, self.every, self.is_remote = project, mode, every, mode == "online"

    def open(self, run: RunFacts) -> Held:
        os.environ.setdefault("WANDB_ERROR_REPORTING", "false")  # two more threads after each failed try
        import wandb

        run_id = self._id(run)
        folder = run.run_dir / "wandb"
        newest = newest_step(folder, run_id) if self.mode == "offline" else -1
        settings = wandb.Settings(
            console="off", silent=True, x_disable_stats=True, init_timeout=INIT_S, quiet=True, disable_code=True
        )
        if self.mode == "offline" and hasattr(settings, "x_server_side_derived_summary"):
            # without it the file gets two summaries a step, in most of the time; `finish` writes the same values once
            settings.x_server_side_derived_summary = True
        self.steps, self.newest = BySteps(), dict[str, float]()
        before = {*folder.glob(f"run-*-{run_id}")}
        try:
            self.run = wandb.init(
                project=self.project,
                name=run.name,
                id=run_id,
                group=run.group,
                dir=str(run.run_dir),
                config={**run.config, "tags": run.tags, "plan": run.plan},
                mode=self.mode,
                resume="allow",
                reinit="create_new",
                settings=settings,
            )
        except BaseException:
            wandb.teardown(exit_code=1)  # otherwise the id is in use when this is tried again
            for path in {*folder.glob(f"run-*-{run_id}")} - before:  # nothing but the logs of this try
                shutil.rmtree(path, ignore_errors=True)
            raise
        if self.mode == "online" and self.run.resumed:
            newest = self.run.step - 1
        return {REST: newest}

    def log(self, rows: list[Row]) -> None:
        complete = list(self.steps.add(rows))
        for row in rows:
            self.newest |= row.values
        if len(complete) >= MANY:
            complete = self._send_many(complete)
        for row in complete:
            self._send(row)

    def finish(self, run: RunFacts) -> None:
        """Send the newest step too, unless the run was killed: a resumed run will complete that step."""
        import wandb

        if run.status != "running":
            for row in self.steps.rest():
                self._send(row)
        self.run.summary.update({**self.newest, **run.summary, "tags": run.tags})
        code = 0 if run.status in ("done", "preempted") else 1
        self.run.finish(exit_code=code)
        wandb.teardown(exit_code=code)  # `finish` does not wait until W&B's own process has written its file

    def _send(self, row: Row) -> None:
        self.run.log({**row.values, "_timestamp": row.time}, step=row.step, commit=True)

    def _send_many(self, rows: list[Row]) -> list[Row]:
        """Send many rows in a tenth of the time; return those that remain for `run.log`.

        `run.log` hands each row over to another thread. This is what it does, without W&B's public names: if another
        version has other ones, nothing is sent here.
        """

        def request(row: Row) -> Any:
            request = new_request()
            request.record_publish._info.stream_id = stream
            history = request.record_publish.request.partial_history
            for key, value in row.values.items():
                item = history.item.add()
                item.key, item.value_json = key, repr(value)
            history.item.add(key="_timestamp", value_json=repr(row.time))
            history.step.num, history.action.flush = row.step, True
            return request

        async def publish_all() -> None:
            for row in rows:
                await publish(request(row))  # W&B's own process stores a row while this one makes the next

        try:
            from wandb.proto import wandb_server_pb2

            interface: Any = self.run._interface
            publish, stream, run_there = interface._client.publish, interface._stream_id, interface._asyncer.run
            new_request: Any = wandb_server_pb2.ServerRequest  # type: ignore[attr-defined]
            request(rows[0])
        except (ImportError, AttributeError, TypeError, ValueError):
            return rows
        run_there(publish_all)
        return []

    def _id(self, run: RunFacts) -> str:
        """Return the run's id; a run of an earlier version has another one."""
        old = str(run.run_dir).replace("/", "-")[-64:]
        return old if any((run.run_dir / "wandb").glob(f"*run-*-{old}")) else run.id


# ---- what W&B's files have already ----------------------------------------------------------------------------


def newest_step(folder: Path, run_id: str) -> int:
    """Return the newest step in the offline files of a run; -1: none. Each attempt has a file, and steps increase."""
    for path in sorted(folder.glob(f"offline-run-*-{run_id}/run-{run_id}.wandb"), reverse=True):
        steps = [step for step, _ in history(path)]
        if steps:
            return max(steps)
    return -1


def history(path: Path) -> Iterator[tuple[int, dict[str, str]]]:
    """Yield (step, values as JSON) of an offline file; wandb has no reader for Python. It ends at damaged bytes."""
    from wandb.proto import wandb_internal_pb2

    kind: Any = wandb_internal_pb2
    for data in blocks(path):
        record = kind.Record()
        try:
            record.ParseFromString(data)
        except Exception:  # protobuf's DecodeError: the file is cut off here
            return
        if record.WhichOneof("record_type") == "history":
            values = {item.key or ".".join(item.nested_key): item.value_json for item in record.history.item}
            yield int(record.history.step.num), values


def blocks(path: Path) -> Iterator[bytes]:
    """Yield the records of a file in LevelDB's log format, in which W&B keeps its own."""
    data = path.read_bytes()
    if not data.startswith(FIRST_BYTES):
        return
    at, parts = len(FIRST_BYTES) + 3, b""
    while at + HEADER <= len(data):
        left = BLOCK - at % BLOCK
        if left < HEADER:
            at += left  # the rest of a block that has no space for a header
            continue
        _, length, kind = struct.unpack_from("<IHB", data, at)
        if not 1 <= kind <= 4 or length > left - HEADER or at + HEADER + length > len(data):
            return
        part = data[at + HEADER : at + HEADER + length]
        at += HEADER + length
        parts = part if kind in (1, 2) else parts + part  # 1: whole, 2: first, 3: middle, 4: last
        if kind in (1, 4):
            yield parts
