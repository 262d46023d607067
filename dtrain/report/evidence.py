"""Evidence in a run folder: the last error of a log, lines that match, and the metrics before the end."""

from __future__ import annotations

import os
import re
import statistics
from collections import deque
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dtrain.runs.folder import parse_line
from dtrain.util.format import finite, number
from dtrain.util.regular_file import open_regular

NEWEST = 2**18  # bytes from the end of a log that are read, at least
COUNTED = 2**28  # in a larger file, the lines before them are not counted
FATAL = re.compile(r"^(Fatal Python error: .+|terminate called after throwing .+|\s*what\(\): .+)$")
RAISED = re.compile(r"^([A-Za-z_][\w.]*(?:Error|Exception|Interrupt|Exit|Warning|Timeout)\w*)(: .*)?$")


@dataclass(frozen=True)
class Evidence:
    """file: inside the run folder, or where else it is from."""

    file: str
    line: int | None
    text: str

    def __str__(self) -> str:
        return f"{self.file}{f':{self.line}' if self.line else ''}: {self.text}"


def numbered_tail(path: Path) -> list[tuple[int, str]]:
    """The last lines of a file with their numbers; of a very large file, the numbers count from what is read."""
    try:
        with open_regular(path) as file:
            begin = max(0, file.seek(0, os.SEEK_END) - NEWEST)
            file.seek(0)
            first = 1 + sum(file.read(NEWEST).count(b"\n") for _ in range(begin // NEWEST) if begin < COUNTED)
            file.seek(begin // NEWEST * NEWEST)
            data = file.read()
    except OSError:
        return []
    return list(enumerate(data.decode(errors="replace").split("\n"), first))


def last_error(path: Path) -> Evidence | None:
    """The last exception or crash in a rank's log."""
    for line, text in reversed(numbered_tail(path)):
        if RAISED.match(text) or FATAL.match(text):
            return Evidence(f"logs/{path.name}", line, text.strip()[:300])
    return None


def line_of(path: Path, pattern: str) -> list[tuple[int, str]]:
    """(number, text) of the lines that match."""
    wanted = re.compile(pattern)
    return [(line, text.strip()[:300]) for line, text in numbered_tail(path) if wanted.search(text)]


@dataclass(frozen=True)
class LastMetrics:
    step: int
    evidence: Evidence


def metrics_before_the_end(run_dir: Path, most: int = 100) -> list[LastMetrics]:
    """The newest step with metrics, if any, and what changed before it: loss, norm, memory, the wait for data."""
    rows: deque[dict[str, Any]] = deque(maxlen=most)
    last = 0
    for line, text in numbered_tail(run_dir / "metrics.jsonl"):
        row = parse_line(text.encode())
        if "loss" in row:
            rows.append(row)
            last = line
    if not rows:
        return []
    parts = [f"step {rows[-1].get('step')}: loss {rows[-1].get('loss')}"]
    for key, name, least in (("loss", "loss", 1.5), ("grad_norm", "gradient norm", 5.0), ("mem_gib", "memory", 1.1)):
        values = [value for row in rows if (value := number(row.get(key))) is not None]
        before, now = (statistics.median(values[:-1]), values[-1]) if len(values) > 4 else (0.0, 0.0)
        if before > 0 and now > least * before:
            parts.append(f"{name} {now / before:.1f} times its median of the {len(values) - 1} steps before")
    waits = [(number(row.get("data_s")) or 0.0) / step_s for row in rows if (step_s := number(row.get("step_s")))]
    if waits and statistics.median(waits) > 0.3:
        parts.append(f"{statistics.median(waits):.0%} of a step was spent on waiting for data")
    step = int(finite(rows[-1].get("step")) or 0)
    return [LastMetrics(step, Evidence("metrics.jsonl", last, "; ".join(parts)))]
