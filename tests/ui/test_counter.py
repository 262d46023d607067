"""How far evaluate and generate are: nothing for what ends at once, else a line now and then."""

from __future__ import annotations

import pytest

from dtrain.ui import counter
from dtrain.ui.counter import Counter


@pytest.fixture
def now(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    found = [0.0]
    monkeypatch.setattr(counter.time, "monotonic", lambda: found[0])
    return found


def lines(capsys: pytest.CaptureFixture[str], progress: Counter, now: list[float], step_s: float) -> list[str]:
    while progress.done < progress.total:
        now[0] += step_s
        progress.add()
    out, err = capsys.readouterr()
    assert out == "", "stdout has the result"
    return err.splitlines()


def test_what_ends_at_once_says_nothing(capsys: pytest.CaptureFixture[str], now: list[float]) -> None:
    assert lines(capsys, Counter(0, 5, "batches", quiet_s=2), now, 0.1) == []
    assert lines(capsys, Counter(0, 5, "prompts"), now, 0.1) == ["5 of 5 prompts, 0 s left"]


def test_a_pipe_gets_a_line_now_and_then(capsys: pytest.CaptureFixture[str], now: list[float]) -> None:
    found = lines(capsys, Counter(0, 25, "batches", quiet_s=2), now, 1.0)
    assert found == ["10 of 25 batches, 15 s left", "20 of 25 batches, 5 s left", "25 of 25 batches, 0 s left"]


def test_the_rest_is_estimated_from_what_was_done_here(capsys: pytest.CaptureFixture[str], now: list[float]) -> None:
    assert lines(capsys, Counter(90, 100, "prompts"), now, 4.0)[0] == "93 of 100 prompts, 28 s left"


def test_a_terminal_gets_one_line(capsys: pytest.CaptureFixture[str], now: list[float]) -> None:
    progress = Counter(0, 2, "batches", quiet_s=2)
    progress.terminal = True
    for _ in range(2):
        now[0] += 3
        progress.add()
    assert capsys.readouterr().err == "\r\x1b[K1 of 2 batches, 3 s left\r\x1b[K2 of 2 batches, 0 s left\n"
