"""Files of a run folder: writes are atomic, and reading a broken file is harmless."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import re
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import datetime
from pathlib import Path
from typing import Any, Literal, TextIO

from dtrain.config.redaction import hidden
from dtrain.runs.protocol import ATTEMPTS_FILE, POSITION_FILE
from dtrain.util import disk_space
from dtrain.util.format import as_dict, finite
from dtrain.util.regular_file import open_regular, read_bytes, regular


def write_json(path: Path, values: dict[str, Any]) -> None:
    """Write a small JSON file atomically, with secrets redacted."""
    temporary = path.with_name(f".{path.name}.tmp")
    text = json.dumps(hidden(values), indent=1) + "\n"
    try:
        temporary.write_text(text)
        os.replace(temporary, path)
    except OSError as error:
        raise disk_space.describe(error, path, len(text)) from error


@contextmanager
def locked(run_dir: Path, patience_s: float = 0) -> Iterator[None]:
    """Lock a run folder: two launchers would corrupt each other's checkpoints. The kernel frees the lock at exit.

    patience_s: how long to wait for another launcher that may be about to end.
    """
    deadline = time.monotonic() + patience_s
    with open(run_dir / ".lock", "a", opener=regular) as file:
        while not _flock(file):
            if time.monotonic() < deadline:
                time.sleep(min(1.0, patience_s))
                continue
            pid = read_json(run_dir / "launch.json").get("pid")
            raise ValueError(
                f"{run_dir}: the run is running (process {pid})\n  fix: wait for it, or stop it first: kill {pid}"
            )
        yield


def is_locked(run_dir: Path) -> bool:
    """Whether a launcher on this machine, or on another one that shares the folder's locks, works in it."""
    try:
        with locked(run_dir):
            return False
    except ValueError:
        return True


def _flock(file: TextIO) -> bool:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def file_clock(folder: Path) -> float:
    """Return the time by the clock that stamps files in this folder: a file server's clock may be minutes off.

    Falls back to the local clock if the folder is not writable.
    """
    import tempfile  # takes 4 ms; most commands do not need it

    try:
        with tempfile.TemporaryFile(dir=folder) as file:
            return os.fstat(file.fileno()).st_mtime
    except OSError:
        return time.time()


def look_again(folder: Path) -> None:
    """Refresh the folder's cache before reading a file that another node may have created.

    A network file system may report "no such file" for up to a minute; a local change makes it ask the server.
    """
    mine = folder / f".look-{os.uname().nodename}-{os.getpid()}"
    with contextlib.suppress(OSError):
        os.close(os.open(mine, os.O_CREAT, 0o600))
        mine.unlink()


def read_json(path: Path) -> dict[str, Any]:
    """Return the object in the file, or {} if it is missing, half-written or not an object."""
    try:
        value = json.loads(read_bytes(path))
    except (OSError, ValueError, RecursionError):  # the last: nested too deeply
        return {}
    return as_dict(value)


def last_launch(launch: dict[str, Any]) -> dict[str, Any]:
    """Return launch.json with the keys of its newest launch on top."""
    launches = launch.get("launches")
    return {**launch, **as_dict(launches[-1] if isinstance(launches, list) and launches else {})}


def launch_time(launch: dict[str, Any]) -> float | None:
    """Return when the run was last launched, in seconds since the epoch."""
    try:
        return datetime.fromisoformat(last_launch(launch)["time"]).timestamp()
    except (KeyError, TypeError, ValueError):
        return None


def read_summary(run_dir: Path) -> dict[str, Any]:
    """Read summary.json; while its status is "running", take the metrics from metrics.jsonl."""
    summary = read_json(run_dir / "summary.json")
    return summary | newest_metrics(run_dir) if summary.get("status") == "running" else summary


OWN = "own"  # a line's list of the names of the user's own metrics in it


def newest_metrics(run_dir: Path) -> dict[str, Any]:
    """Return the newest metrics of metrics.jsonl, under the names of the summary."""
    newest: dict[str, Any] = {}
    own: dict[str, None] = {}  # names of the user's own metrics, in order
    for line in last_lines(run_dir / "metrics.jsonl"):  # about 200: `dtrain runs` reads many runs
        row = parse_line(line)
        newest.update(row)
        listed = row.get(OWN)
        own |= dict.fromkeys(str(name) for name in listed) if isinstance(listed, list) else {}
    names = {"step": "steps", "loss": "train_loss", "mem_gib": "peak_mem_gib"}
    same = ("val_loss", "val_accuracy", "val_top5", "val_perplexity", "tokens_per_s", "mfu")
    names.update({key: key for key in same})
    found = {names[k]: v for k, v in newest.items() if k in names and v is not None}
    mine = {name: newest[name] for name in own if name not in names and finite(newest.get(name)) is not None}
    return found | mine | ({"own_metrics": sorted(mine)} if mine else {})


def parse_line(line: bytes) -> dict[str, Any]:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError):
        return {}
    return as_dict(row)


def parse_lines(lines: Sequence[bytes]) -> list[dict[str, Any]]:
    """Parse many lines at once: a third faster. One by one if any of them is damaged."""
    try:
        rows = json.loads(b"[" + b",".join(lines) + b"]")
    except (ValueError, RecursionError):
        rows = []
    if len(rows) == len(lines) and all(type(row) is dict for row in rows):
        return list(rows)
    return [parse_line(line) for line in lines]


def checkpoints(folder: Path) -> list[Path]:
    """List the checkpoints in a folder, newest first. A save renames its folder last, so each was once complete."""
    found = [p for p in folder.glob("step-*") if re.fullmatch(r"step-\d{8,18}", p.name, re.ASCII) and p.is_dir()]
    return sorted(found, key=lambda p: int(p.name[5:]), reverse=True)


def latest_checkpoint(run_dir: Path) -> Path | None:
    """Return the newest checkpoint with a manifest, for display: only loading verifies that it is intact."""
    return next((p for p in checkpoints(run_dir / "checkpoints") if (p / "manifest.json").is_file()), None)


def newest_step(run_dir: Path) -> int:
    newest = latest_checkpoint(run_dir)
    return int(newest.name.removeprefix("step-")) if newest else 0


def note_attempt(run_dir: Path, event: Literal["start", "placed", "end"], **values: Any) -> None:
    """Append a line to attempts.jsonl. On a full disk drop it: the caller must survive to report the cause.

    placed: the nodes of the newest start, from a launcher that does not know them when it starts.
    """
    line = {"event": event, "time": time.time(), "step": newest_step(run_dir), **values}
    before = [parse_line(text) for text in last_lines(run_dir / ATTEMPTS_FILE, 2**16)[-1:]]
    if event == "start" and before and before[0].get("event") != "end":  # the attempt before was killed
        line["last_sign"] = last_sign(run_dir)
    with suppress(OSError), open(run_dir / ATTEMPTS_FILE, "a", opener=regular) as file:
        file.write(json.dumps(line) + "\n")


def last_sign(run_dir: Path) -> float:
    """When the ranks last wrote a file, in seconds since the epoch; 0: never."""
    times = [0.0]
    for name in ("metrics.jsonl", "summary.json", POSITION_FILE.format(0)):
        with suppress(OSError):
            times.append((run_dir / name).stat().st_mtime)
    return max(times)


def wall_s(run_dir: Path) -> float | None:
    """Return the seconds that all attempts of a run took, up to now if one has not ended; None: none was noted.

    An attempt that was killed counts to its last sign of life, which the next one notes when it starts.
    """
    try:
        lines = [parse_line(line) for line in read_bytes(run_dir / ATTEMPTS_FILE).splitlines()]
    except OSError:
        return None
    total, began = 0.0, None
    for line in (*lines, {"event": "now", "time": time.time()}):
        ends = {"start": line.get("last_sign"), "end": line.get("time"), "now": line.get("time")}
        if began is not None and line.get("event") in ends:
            total += max(0.0, (finite(ends[line["event"]]) or began) - began)
            began = None
        if line.get("event") == "start":
            began = finite(line.get("time"))
    return total if any(line.get("event") == "start" for line in lines) else None


class Tail:
    """Reads new lines of a file that another process appends to, truncates or replaces."""

    def __init__(self, path: Path):
        self.path = path
        self.offset = 0
        self.before = b""  # the bytes before offset; if they change, the file was replaced

    def skip(self, keep: int) -> None:
        """Go near the end of a long file, to the start of a line: the next read returns about the last `keep` bytes."""
        try:
            with open_regular(self.path) as file:
                start = max(0, file.seek(0, os.SEEK_END) - keep)
                file.seek(start)
                data = file.read(keep)
        except OSError:  # does not exist yet
            return
        skipped = data[: data.find(b"\n") + 1 or len(data)] if start else b""
        self.offset, self.before = start + len(skipped), skipped[-64:]

    def read(self, final: bool = False) -> tuple[list[bytes], bool]:
        """Return new lines, and whether the file was read again from its start. final: include an incomplete line."""
        data, again = self._data()
        return shown(self._take(data, len(data) if final else data.rfind(b"\n") + 1)), again

    def _data(self) -> tuple[bytes, bool]:
        try:
            with open_regular(self.path) as file:
                file.seek(self.offset - len(self.before))
                data = file.read()
                again = not data.startswith(self.before)
                if again:
                    file.seek(0)
                    data, self.before, self.offset = file.read(), b"", 0
                else:
                    data = data[len(self.before) :]
        except OSError:  # does not exist yet, or is being renamed
            return b"", False
        return data, again

    def _take(self, data: bytes, end: int) -> bytes:
        """Return the data up to `end`, which is not read again."""
        taken = data[:end]
        self.offset += len(taken)
        self.before = (self.before + taken)[-64:]
        return taken


class LogTail(Tail):
    """Reads a program's log; a line that is overwritten again and again, as by a progress bar, appears now and then."""

    due = 0.0  # when its text is returned next

    def read(self, final: bool = False) -> tuple[list[bytes], bool]:
        lines, again = super().read(final)
        if final or time.monotonic() < self.due:
            return lines, again
        data, _ = self._data()
        end = data.rfind(b"\r", 0, -1) + 1  # -1: the last one may be the beginning of \r\n
        if end and (text := data[end:].strip()):
            self._take(data, end)
            self.due = time.monotonic() + PROGRESS_S
            lines.append(text)
        return lines, again


PROGRESS_S = 10.0  # between two texts of a progress bar


def shown(data: bytes) -> list[bytes]:
    """Split into lines as a terminal shows them: of a text that a carriage return overwrote, only the last version."""
    if b"\r" not in data:
        return data.splitlines()
    return [line.rstrip(b"\r").rpartition(b"\r")[2] for line in data.removesuffix(b"\n").split(b"\n")]


def last_lines(path: Path, size: int = 65536) -> list[bytes]:
    """Return the lines in the last `size` bytes of a file, without one that begins before them."""
    tail = Tail(path)
    tail.skip(size)
    return tail.read(final=True)[0]


def predicted(run_dir: Path) -> dict[str, float] | None:
    """Return the metrics of plan.json that a summary has too, by name; None: there was no prediction."""
    plan = read_json(run_dir / PLAN)
    if as_dict(plan.get("memory_gib")).get("limit") is None:  # on a CPU the process is measured, not its tensors
        plan.pop("memory_gib", None)
    values = {key: as_dict(plan.get(key)).get("total", plan.get(key)) for key in PREDICTED_METRICS}
    return {key: number for key, value in values.items() if (number := finite(value)) is not None} or None


PLAN = "plan.json"
PREDICTED_METRICS = (
    "tokens_per_s",
    "step_s",
    "mfu",
    "memory_gib",
)  # no wall time: startup, saving and evaluation are left out
