"""Waits that adapt to the machine: it may be busy with something else, and then all of it takes longer."""

from __future__ import annotations

import time
from collections.abc import Callable

from dtrain.runs.protocol import Deadline, slowness

MEASURED = {"at": -60.0, "slowness": 1.0}


def patience(seconds: float) -> float:
    """For a limit that somebody else keeps (a subprocess, a socket): as much longer as this machine is slow now.

    Measured at most every 5 s: it takes 30 ms, and each of 3,400 tests asks for its own time limit.
    """
    if time.monotonic() - MEASURED["at"] > 5:
        MEASURED.update(at=time.monotonic(), slowness=slowness())
    return seconds * MEASURED["slowness"]


def until(true: Callable[[], object], what: str, timeout: float = 60, state: Callable[[], str] = str) -> None:
    """Wait for `what`: `timeout` seconds on a quiet machine. The error says what was waited for, and the last state."""
    deadline = Deadline(timeout)
    while not true():
        assert deadline.left() > 0, f"{what}: not within {deadline}\n{state()}"
        time.sleep(0.05)
