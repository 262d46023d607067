"""A command that needs a run, and was given none, says what to give."""

import pytest

from dtrain.cli import COMMANDS, main
from tests import rundirs
from tests.rundirs import make

in_tmp_path = rundirs.in_tmp_path
WITHOUT = {  # commands that do something useful without a run, or take none
    "launch", "plan", "verify", "search", "runs", "watch", "log", "why", "metrics", "env", "preflight", "recipes",
    "comm", "data", "explain", "completion",
}  # fmt: skip


@pytest.mark.parametrize("command", sorted(COMMANDS.keys() - WITHOUT))
def test_without_a_run(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([command]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: run: none is given, and none is under outputs/ and multirun/ of /")
    make("outputs/d/a")
    assert main([command]) == 2
    error = capsys.readouterr().err
    rest = {"scale": " NUMBER", "generate": " PROMPTS"}.get(command, "")
    expected = f"  fix: name a run: dtrain {command} latest{rest}; the newest are\n    outputs/d/a"
    assert error.splitlines() == ["error: run: none is given", *expected.splitlines()]


def test_other_mistakes_are_argparses(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["status", "a", "--jsn"])
    assert "unrecognized arguments: --jsn" in capsys.readouterr().err
