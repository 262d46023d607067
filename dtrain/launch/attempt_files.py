"""Detects from files whether the ranks of one attempt started, made a step or failed. Polled for days.

A file belongs to this attempt if it differs from its state before the ranks started. No local clock is involved: file
times come from the file server, whose clock may be a minute off. While nothing changes, a poll costs one stat for any
number of ranks: all ranks write into one folder, and its mtime changes with every new file.
"""

from __future__ import annotations

import os
import time
from pathlib import Path

SETTLE_S = 2.0  # keep listing this long after a change: two changes within one file system tick have equal mtimes
LIST_S = 30.0  # list at least this often: some file systems (object stores) do not update folder mtimes

Signature = tuple[int, int, int]


def signature(path: str | Path) -> Signature | None:
    """Return a value that changes with every write; None: the file does not exist."""
    try:
        stat = os.stat(path)
    except OSError:
        return None
    return stat.st_mtime_ns, stat.st_ino, stat.st_size


class AttemptFiles:
    """Created before the ranks start."""

    def __init__(self, run_dir: Path) -> None:
        self.logs, self.metrics = run_dir / "logs", run_dir / "metrics.jsonl"
        self.before = {name: signature(self.logs / name) for name in self._names("rank-", "failure-")}
        self.metrics_before = signature(self.metrics)
        self.folder: Signature | None = None
        self.list_until = self.listed = 0.0

    def _names(self, *prefixes: str) -> list[str]:
        try:
            return [name for name in os.listdir(self.logs) if name.startswith(prefixes)]
        except OSError:
            return []

    def _is_new(self, name: str) -> bool:
        now = signature(self.logs / name)
        return now is not None and now != self.before.get(name)

    def has_started(self) -> bool:
        """Has any rank written to its log? Costs one stat per log; the supervisor stops asking once it is true."""
        return any(self._is_new(name) for name in self._names("rank-") if name.endswith(".log"))

    def has_stepped(self) -> bool:
        return signature(self.metrics) not in (None, self.metrics_before)

    def has_failed(self) -> bool:
        """Has any rank written a failure note?"""
        folder, now = signature(self.logs), time.monotonic()
        if folder != self.folder:
            self.folder, self.list_until = folder, now + SETTLE_S
        if now >= self.list_until and now < self.listed + LIST_S:
            return False
        self.listed = now
        return any(self._is_new(name) for name in self._names("failure-") if name.endswith(".json"))
