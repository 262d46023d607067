"""TensorBoard's event files, in the folder `tensorboard` of the run folder. Its own package; no TensorFlow."""

from __future__ import annotations

import os
import socket
import struct
import time
from typing import Any

import numpy as np

from dtrain.loggers.tracker import Held, Row, RunFacts

FOLDER = "tensorboard"


class TensorBoard:
    """Always has the values of metrics.jsonl, in float32: it is written again when a resumed run drops steps."""

    mirrors, takes_system, is_remote = True, True, False

    def __init__(self, every: int = 1) -> None:
        self.every = every

    def open(self, run: RunFacts) -> Held:
        from tensorboard.compat.proto.event_pb2 import Event

        folder = run.run_dir / FOLDER
        if folder.is_symlink():  # a run folder may come from someone else, and old files are deleted here
            raise ValueError(f"{folder} is a link; remove it")
        folder.mkdir(exist_ok=True)
        old = list(folder.glob("events.out.tfevents.*.dtrain"))  # not those of the user's own code
        # TensorBoard reads the files of a folder in the order of their names, each from where it stopped
        number = max(
            [int(time.time()), *(1 + int(p.name.split(".")[3]) for p in old if p.name.split(".")[3].isdigit())]
        )
        path = folder / f"events.out.tfevents.{number:010d}.{socket.gethostname()}.{os.getpid()}.dtrain"
        self.file = open(path, "xb")  # noqa: SIM115 (until the follower ends)
        self._write([Event(wall_time=time.time(), file_version="brain.Event:2").SerializeToString()])
        for path in old:
            path.unlink(missing_ok=True)
        about = {**run.tags, **run.settings()}
        self._write([text("run", table(about), 0)])
        return {}

    def log(self, rows: list[Row]) -> None:
        from tensorboard.compat.proto.event_pb2 import Event

        event, found = Event(), []  # one for all rows: half the time
        for row in rows:
            event.Clear()
            event.wall_time, event.step = row.time, row.step
            for tag, number in row.values.items():
                value = event.summary.value.add()
                value.tag, value.simple_value = tag, number
            found.append(event.SerializeToString())
        self._write(found)

    def finish(self, run: RunFacts) -> None:
        self._write([text("summary", table(run.summary), int(run.summary.get("steps") or 0))])
        self.file.close()

    def _write(self, events: list[bytes]) -> None:
        self.file.write(records(events))
        self.file.flush()


def table(values: dict[str, Any]) -> str:
    """A Markdown table; TensorBoard renders it, without HTML."""
    rows = [f"| {key} | {str(value).replace('|', '/')} |" for key, value in values.items() if value is not None]
    return "\n".join(["| name | value |", "|---|---|", *(" ".join(row.split()) for row in rows)])


def text(tag: str, content: str, step: int) -> bytes:
    from tensorboard.compat.proto.event_pb2 import Event
    from tensorboard.compat.proto.summary_pb2 import Summary, SummaryMetadata
    from tensorboard.compat.proto.tensor_pb2 import TensorProto
    from tensorboard.compat.proto.types_pb2 import DT_STRING

    plugin = SummaryMetadata(plugin_data=SummaryMetadata.PluginData(plugin_name="text"))
    tensor = TensorProto(dtype=DT_STRING, string_val=[content.encode()])
    value = Summary.Value(tag=tag, metadata=plugin, tensor=tensor)
    event = Event(wall_time=time.time(), step=step, summary=Summary(value=[value]))
    return bytes(event.SerializeToString())


# ---- the file format: length, its checksum, the bytes, their checksum -----------------------------------------


def _table() -> np.ndarray:
    table = np.arange(256, dtype=np.uint32)
    for _ in range(8):
        table = np.where(table & 1, (table >> 1) ^ np.uint32(0x82F63B78), table >> 1).astype(np.uint32)
    return table


CRC32C = _table()


def masked_crc32c(blocks: list[bytes]) -> list[int]:
    """The checksums of TensorBoard's file format, of all blocks at once: its own Python loop takes 100 µs for each."""
    if not blocks:
        return []
    lengths = np.array([len(block) for block in blocks])
    longest = int(lengths.max())
    padded = np.frombuffer(b"".join(block.ljust(longest, b"\0") for block in blocks), np.uint8)
    columns = np.ascontiguousarray(padded.reshape(len(blocks), longest).T)
    crc = np.full(len(blocks), 0xFFFFFFFF, np.uint32)
    found = crc.copy()
    for i in range(longest):
        crc = CRC32C[(crc ^ columns[i]) & np.uint32(0xFF)] ^ (crc >> np.uint32(8))
        found = np.where(lengths == i + 1, crc, found)
    found = ~found
    rotated = (found >> np.uint32(15)) | (found << np.uint32(17))
    return [int(value) for value in rotated + np.uint32(0xA282EAD8)]


def records(blocks: list[bytes]) -> bytes:
    heads = [struct.pack("<Q", len(block)) for block in blocks]
    checks = zip(heads, masked_crc32c(heads), blocks, masked_crc32c(blocks), strict=True)
    return b"".join(
        head + struct.pack("<I", of_head) + block + struct.pack("<I", of_block)
        for head, of_head, block, of_block in checks
    )
