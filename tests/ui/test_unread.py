"""What happens to output whose reader has gone; tests/launch/test_local.py has it in a run."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout

import pytest

from dtrain.ui import unread


@pytest.fixture
def shown(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What reaches the terminal."""
    texts: list[str] = []
    monkeypatch.setattr(unread, "to_terminal", texts.append)
    monkeypatch.setattr(unread, "_unread", set())
    return texts


@contextmanager
def unbroken_output() -> Iterator[None]:
    """The same, over a stdout that nobody reads."""
    reading, writing = os.pipe()
    os.close(reading)
    with os.fdopen(writing, "w") as stream, redirect_stdout(stream), unread.unbroken_output():
        yield


def test_it_is_discarded_with_one_warning(shown: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with unbroken_output():
        for step in range(3):
            print("step", step, flush=True)
    assert shown == [] and capsys.readouterr().err.count("warning: nobody reads the output any more") == 1


def test_after_a_stop_request_it_goes_to_the_terminal(shown: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    """Ctrl-C ends tee first: the run notices only with its next line."""
    with unbroken_output():
        unread.stopping()
        print("stop requested", flush=True)
        print("saved")
    assert shown == ["stop requested\n", "saved\n"] and capsys.readouterr().err == ""


def test_of_a_run_whose_reader_had_gone_before_only_what_follows(shown: list[str]) -> None:
    with unbroken_output():
        print("step 1", flush=True)
        unread.stopping()
        print("stop requested", flush=True)
    assert shown == ["stop requested\n"]
