"""Files of a run folder: written so that a reader never sees half of one, read so that a broken one does no harm."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import re
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import datetime
from pathlib import Path
from typing import Any, Literal

from dtrain import diskspace
from dtrain.contract import ATTEMPTS_FILE
from dtrain.redaction import hidden
from dtrain.words import as_dict


def write_json(path: Path, values: dict[str, Any]) -> None:
    """Write a small JSON file so that a reader sees the old one or the new one, never half; and no secret."""
    temporary = path.with_name(f".{path.name}.tmp")
    text = json.dumps(hidden(values), indent=1) + "\n"
    try:
        temporary.write_text(text)
        os.replace(temporary, path)
    except OSError as error:
        raise diskspace.describe(error, path, len(text)) from error


@contextmanager
def locked(run_dir: Path) -> Iterator[None]:
    """Hold a run folder: two launchers in one would spoil each other's checkpoints. The kernel frees it at death."""
    with open(run_dir / ".lock", "a") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            pid = read_json(run_dir / "launch.json").get("pid")
            raise ValueError(
                f"{run_dir}: the run is running (process {pid})\n  fix: wait for it, or stop it first: kill {pid}"
            ) from None
        yield


def file_clock(folder: Path) -> float:
    """The time by the clock that stamps files in this folder: a file server's may be minutes away from ours.

    Ours where we may not write.
    """
    import tempfile  # 4 ms that most commands need not wait for

    try:
        with tempfile.TemporaryFile(dir=folder) as file:
            return os.fstat(file.fileno()).st_mtime
    except OSError:
        return time.time()


def look_again(folder: Path) -> None:
    """Before a file is read that another node may have made since we last asked for it.

    A network file system may go on answering "no such file" for a minute; a change of our own makes it ask the server.
    """
    mine = folder / f".look-{os.uname().nodename}-{os.getpid()}"
    with contextlib.suppress(OSError):
        os.close(os.open(mine, os.O_CREAT, 0o600))
        mine.unlink()


def read_json(path: Path) -> dict[str, Any]:
    """The object in the file, or {} when it is missing, half-written or something else."""
    try:
        value = json.loads(path.read_bytes())
    except (OSError, ValueError):
        return {}
    return as_dict(value)


def last_launch(launch: dict[str, Any]) -> dict[str, Any]:
    """launch.json seen from its newest launch: that one's keys over the file's own."""
    launches = launch.get("launches")
    return {**launch, **as_dict(launches[-1] if isinstance(launches, list) and launches else {})}


def launch_time(launch: dict[str, Any]) -> float | None:
    """When the run was last launched, in seconds since the epoch."""
    try:
        return datetime.fromisoformat(last_launch(launch)["time"]).timestamp()
    except (KeyError, TypeError, ValueError):
        return None


def read_summary(run_dir: Path) -> dict[str, Any]:
    """summary.json; while it says running its figures are not written yet, and come from metrics.jsonl."""
    summary = read_json(run_dir / "summary.json")
    return summary | newest_figures(run_dir) if summary.get("status") == "running" else summary


def newest_figures(run_dir: Path) -> dict[str, Any]:
    """What metrics.jsonl says last, by the names of the summary."""
    newest: dict[str, Any] = {}
    try:
        with open(run_dir / "metrics.jsonl", "rb") as file:
            # Only the end of the file, about 200 lines: `dtrain runs` reads many runs.
            file.seek(max(0, file.seek(0, os.SEEK_END) - 65536))
            for line in file.read().splitlines():
                newest.update(parse_line(line))
    except OSError:
        pass  # no step was made yet
    names = {"step": "steps", "loss": "train_loss", "mem_gib": "peak_mem_gib"}
    same = ("val_loss", "val_accuracy", "val_top5", "val_perplexity", "tokens_per_s", "mfu")
    names.update({key: key for key in same})
    return {names[k]: v for k, v in newest.items() if k in names and v is not None}


def parse_line(line: bytes) -> dict[str, Any]:
    try:
        row = json.loads(line)
    except ValueError:
        return {}
    return as_dict(row)


def checkpoints(folder: Path) -> list[Path]:
    """The checkpoints in a folder, newest first. A save's rename came last, so each was whole once."""
    found = [p for p in folder.glob("step-*") if re.fullmatch(r"step-\d{8,18}", p.name, re.ASCII) and p.is_dir()]
    return sorted(found, key=lambda p: int(p.name[5:]), reverse=True)


def latest_checkpoint(run_dir: Path) -> Path | None:
    """The newest checkpoint that has its manifest, for people to see: only a load finds out whether it is whole."""
    return next((p for p in checkpoints(run_dir / "checkpoints") if (p / "manifest.json").is_file()), None)


def newest_step(run_dir: Path) -> int:
    newest = latest_checkpoint(run_dir)
    return int(newest.name.removeprefix("step-")) if newest else 0


def note_attempt(run_dir: Path, event: Literal["start", "end"], **values: Any) -> None:
    """Add a line to attempts.jsonl. On a full disk there is none: that must not end what is about to report it."""
    line = {"event": event, "time": time.time(), "step": newest_step(run_dir), **values}
    with suppress(OSError), open(run_dir / ATTEMPTS_FILE, "a") as file:
        file.write(json.dumps(line) + "\n")


class Tail:
    """New lines of a file that another process appends to, cuts short or replaces."""

    def __init__(self, path: Path):
        self.path = path
        self.offset = 0
        self.before = b""  # the bytes just before offset: when they changed, this is another file

    def read(self, final: bool = False) -> tuple[list[bytes], bool]:
        """New lines, and whether the file was read again from its start. final: also a line without end."""
        try:
            with open(self.path, "rb") as file:
                file.seek(self.offset - len(self.before))
                data = file.read()
                again = not data.startswith(self.before)
                if again:
                    file.seek(0)
                    data, self.before, self.offset = file.read(), b"", 0
                else:
                    data = data[len(self.before) :]
        except OSError:  # not there yet, or between two names
            return [], False
        if not final:
            data = data[: data.rfind(b"\n") + 1]  # the rest is still being written
        self.offset += len(data)
        self.before = (self.before + data)[-64:]
        return data.splitlines(), again
