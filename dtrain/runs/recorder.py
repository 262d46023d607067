"""Write metrics.jsonl: a line of JSON for each step. No torch: a user's own program writes it, too (dtrain.script)."""

from __future__ import annotations

import json
import math
import os
import time
from pathlib import Path
from typing import Any

from dtrain.util import disk_space

_encode = json.JSONEncoder(allow_nan=False).encode


class Recorder:
    """Append metrics to metrics.jsonl. On resume, first drop the steps that will be repeated."""

    def __init__(self, run_dir: Path, start_step: int) -> None:
        self.path = run_dir / "metrics.jsonl"
        self.rewind(start_step)

    def rewind(self, step: int) -> None:
        """Drop the lines of later steps."""
        kept = [line for line in _lines(self.path) if line["step"] <= step]
        temporary = self.path.with_name(".metrics.jsonl.tmp")
        temporary.write_text("".join(_dump(line) for line in kept))
        os.replace(temporary, self.path)
        # open until the process ends; line-buffered, so that a reader sees each step immediately
        self.file = open(self.path, "a", buffering=1)  # noqa: SIM115

    def write(self, **values: Any) -> None:
        try:
            self.file.write(_dump(values | {"time": round(time.time(), 3)}))
        except OSError as error:
            raise disk_space.describe(error, Path(self.file.name), 1000) from error


def _lines(path: Path) -> list[dict[str, Any]]:
    lines = []
    for text in path.read_text().splitlines() if path.exists() else []:
        try:
            lines.append(json.loads(text))
        except ValueError:  # an incomplete last line, left by a killed run
            continue
    return lines


def _dump(values: dict[str, Any]) -> str:
    """Return one JSON line. Floats round-trip exactly. NaN and Inf are not valid JSON, so they become null."""
    try:
        return _encode(values) + "\n"
    except ValueError:  # rare; checking every value up front took a fifth of the time
        finite = {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in values.items()}
        return _encode(finite) + "\n"
