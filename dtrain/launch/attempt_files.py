"""What the ranks of one attempt have written: did they start, make a step, fail? Asked again and again, for days.

A file belongs to this attempt if it differs from what was there before the ranks were started. Nothing is compared with
a clock: file times come from the file server, whose clock may be a minute away from ours. While nothing changes a
question costs one stat, whatever the number of ranks: they all write into one folder, whose time then changes.
"""

from __future__ import annotations

import os
import time
from pathlib import Path

SETTLE_S = 2.0  # list again for so long after a change: two changes within a file system's tick have the same time
LIST_S = 30.0  # list anyway so often: some file systems (object stores) do not keep the times of folders

Signature = tuple[int, int, int]


def signature(path: str | Path) -> Signature | None:
    """Changes with every write; None: the file is not there."""
    try:
        stat = os.stat(path)
    except OSError:
        return None
    return stat.st_mtime_ns, stat.st_ino, stat.st_size


class AttemptFiles:
    """Made before the ranks are started."""

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
        """Has any rank written to its log? Costs a stat per log, so it is asked only until it is true."""
        return any(self._is_new(name) for name in self._names("rank-") if name.endswith(".log"))

    def has_stepped(self) -> bool:
        return signature(self.metrics) not in (None, self.metrics_before)

    def has_failed(self) -> bool:
        """Has any rank left a note that it failed?"""
        folder, now = signature(self.logs), time.monotonic()
        if folder != self.folder:
            self.folder, self.list_until = folder, now + SETTLE_S
        if now >= self.list_until and now < self.listed + LIST_S:
            return False
        self.listed = now
        return any(self._is_new(name) for name in self._names("failure-") if name.endswith(".json"))
