"""search.jsonl in the folder of a search: every decision and every result, one line each, only ever appended.

A decision is on disk before it is carried out. So the file says, at any time, what the search has done and what it was
doing: the same command continues from it. It is also the lineage of population-based training.

    {"event": "train", "trial": 3, "steps": 20, "run": "3-optim.lr=0.01", "values": {"optim.lr": 0.01}}
    {"event": "result", "trial": 3, "steps": 20, "value": 2.31, "status": "done"}
    {"event": "exploit", "trial": 3, "donor": 0, "steps": 20, "run": "3-at-20-from-0", "donor_run": "0-optim.lr=0.1",
     "old_values": {"optim.lr": 0.01}, "donor_values": {"optim.lr": 0.1}, "values": {"optim.lr": 0.12}}
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from dtrain.runs.folder import parse_line
from dtrain.util.regular_file import read_bytes, regular

JOURNAL = "search.jsonl"
STUDY = "study.journal"  # optuna's own
Event = dict[str, Any]


def read_journal(folder: Path) -> list[Event]:
    """Return the events; a last line without its end was never acted on."""
    try:
        data = read_bytes(folder / JOURNAL)
    except OSError:
        return []
    return [event for line in data[: data.rfind(b"\n") + 1].splitlines() if (event := parse_line(line)).get("event")]


class Journal:
    """The events of a search; for the one process that appends to them (the folder is locked)."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / JOURNAL
        self.events = read_journal(folder)
        if self.path.exists():  # drop a line that a killed process did not finish
            data = read_bytes(self.path)
            os.truncate(self.path, data.rfind(b"\n") + 1)

    def append(self, event: Event) -> None:
        """Add an event. When this returns, the event is on disk."""
        with open(self.path, "a", opener=regular) as file:
            file.write(json.dumps(event) + "\n")
            file.flush()
            os.fsync(file.fileno())
        self.events.append(event)
