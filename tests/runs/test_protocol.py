"""Waits: as long as was asked for on a quiet machine, longer on a busy one, and never for ever."""

from __future__ import annotations

import os
import time

import pytest

from dtrain.runs import protocol
from dtrain.runs.protocol import MOST_PATIENCE, Deadline, slowness
from tests.patience import until


@pytest.mark.parametrize(
    ("load", "expected"),
    [(0.0, 1.0), (2.0, 1.0), (6.0, 3.0), (200.0, MOST_PATIENCE)],
)
def test_a_machine_is_as_slow_as_its_cores_are_wanted(
    load: float, expected: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "cpu_count", lambda: 2)
    monkeypatch.setattr(os, "getloadavg", lambda: (load, load, load))
    monkeypatch.setattr(protocol, "QUIET_S", 1e9)  # the task says nothing
    assert slowness() == expected
    monkeypatch.setattr(protocol, "QUIET_S", 1e-9)  # the task takes far too long
    assert slowness() == MOST_PATIENCE


def test_a_deadline_moves_while_the_machine_is_busy_and_no_further(monkeypatch: pytest.MonkeyPatch) -> None:
    speed = [1.0]
    monkeypatch.setattr(protocol, "slowness", lambda: speed[0])
    deadline = Deadline(100)
    assert 99 < deadline.left() <= 100
    deadline.began -= 150
    assert deadline.left() < 0
    speed[0] = 4.0
    assert 249 < deadline.left() <= 250
    speed[0] = 1.0
    assert 249 < deadline.left() <= 250, "what was granted stays"
    deadline.began -= 250
    assert deadline.left() <= 0 and str(deadline) == "400 s on a machine 4.0 times as slow as a quiet one"


def test_who_gives_up_says_what_it_waited_for_and_what_there_is() -> None:
    with pytest.raises(AssertionError, match=r"(?s)a miracle: not within \d s on a machine .*\nthe queue is empty"):
        until(lambda: False, "a miracle", 0.01, lambda: "the queue is empty")
    began = time.monotonic()
    until(lambda: time.monotonic() > began + 0.1, "a moment", 5)
