"""The user's own classes as options of a launch."""

from __future__ import annotations

from pathlib import Path

import pytest

from dtrain.cli import main
from dtrain.launch.user_code import trust_of
from tests.launch.dry_launches import started

__all__ = ["started"]


def test_a_mistake_in_your_own_file_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "broken_net.py").write_text("class Net(:\n    pass\n")
    assert (
        main(["launch", "model=broken_net.Net", "data=digits", "data.image_size=8", "data.channels=1", "dry_run=true"])
        == 2
    )
    error = capsys.readouterr().err
    assert "broken_net.py:1 is not valid Python" in error and "fix: correct broken_net.py:1" in error


@pytest.mark.parametrize("typed", ["[net]", "net", "['net']", '["net"]', "[net,]"])
def test_a_trusted_module_as_the_shell_and_python_spell_it(typed: str) -> None:
    assert trust_of([f"trust={typed}"]) == ["net"]
    assert trust_of(["trust=[]"]) == trust_of([]) == []
