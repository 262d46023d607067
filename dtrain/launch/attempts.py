"""What attempts.jsonl and the summary say about earlier starts of a job that a scheduler starts again."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from dtrain.config.files import is_script
from dtrain.config.run_length import last_step
from dtrain.runs.folder import parse_line, read_summary
from dtrain.runs.protocol import ATTEMPTS_FILE, FAILED


def is_done(run_dir: Path, config: dict[str, Any]) -> bool:
    """Was it started again after its end?"""
    summary = read_summary(run_dir)
    if is_script(config):  # it says so itself
        return summary.get("status") == "done"
    last = last_step(config["train"], summary)  # None: the epochs are others than those of the summary
    return summary.get("status") == "done" and last is not None and summary.get("steps", 0) >= last


def lines(run_dir: Path) -> list[dict[str, Any]]:
    path = run_dir / ATTEMPTS_FILE
    return [parse_line(line) for line in path.read_bytes().splitlines()] if path.exists() else []


def idle_starts(run_dir: Path, starting: tuple[str | None, int] | None = None) -> int:
    """Count the newest job's consecutive starts from the same checkpoint, including the newest start.

    starting: job and step of a start that is not noted yet. Restarts inside a job (cluster.max_restarts) have their own
    limit and do not count.
    """
    outer = [line for line in reversed(lines(run_dir)) if line.get("event") == "start" and not line.get("attempt")]
    starts = [(line.get("job_id"), line.get("step"), line.get("saved")) for line in outer]
    if starting:
        starts.insert(0, (*starting, None))
    return next((i for i, start in enumerate(starts) if start != starts[0]), len(starts))


def num_failed(run_dir: Path, job_id: str | None) -> int:
    """Count the starts of this job that have failed."""
    ours, count = False, 0
    for line in lines(run_dir):
        if line.get("event") == "start":
            ours = line.get("job_id") == job_id
        count += ours and line.get("event") == "end" and line.get("code") == FAILED
    return count
