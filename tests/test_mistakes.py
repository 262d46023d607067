"""Mistakes in the user's own code: right exit code, file and line or setting, no traceback, and a fix that works."""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.mistakes import MISTAKES, Mistake, replaced
from tests.mistakes_run import machine, typed


@pytest.fixture(autouse=True)
def on_a_machine() -> Iterator[None]:
    with machine():
        yield


@pytest.mark.parametrize("mistake", MISTAKES, ids=[m.name.replace(" ", "-") for m in MISTAKES])
def test_a_mistake_is_explained(mistake: Mistake, tmp_path: Path) -> None:
    (tmp_path / "net.py").write_text(mistake.source)
    code, screen = typed(mistake.command, tmp_path)
    assert code == mistake.code, screen
    assert "Traceback" not in screen, screen
    assert "resume=" not in screen or re.search(r"step +1/", screen), "there is nothing to resume"
    for word in mistake.words:
        assert word in screen, screen
    if code == 2:
        assert screen.count("fix: ") == 1, screen
    if mistake.fix:
        assert mistake.fix in screen.partition("fix: ")[2], screen
        again = replaced(mistake.command, (mistake.fix, "dry_run=true", "run_dir=again"))
        code, screen = typed(again, tmp_path)
        assert code == 0, screen


def test_a_good_file_trains(tmp_path: Path) -> None:
    (tmp_path / "net.py").write_text(MISTAKES[0].source)
    code, screen = typed(Mistake("none", 0, ()).command, tmp_path)
    assert code == 0 and "4 of 4" in screen, screen
