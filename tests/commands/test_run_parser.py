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
    rest = {"scale": " NUMBER", "generate": " PROMPTS -o OUT"}.get(command, "")
    expected = f"  fix: name a run: dtrain {command} latest{rest}; the newest are\n    outputs/d/a"
    assert error.splitlines() == ["error: run: none is given", *expected.splitlines()]


@pytest.mark.parametrize(
    ("command", "told"),
    [
        ("export a --format onxx", "--format=onxx: there is no such choice\n  fix: did you mean --format onnx? "),
        ("export a --format", "--format: needs a value\n  fix: --format can be safetensors, "),
        ("export a b c", "c: is one argument too many\n  fix: leave out c; "),
        ("runs tag a", "TAG: is missing\n  fix: dtrain runs tag a TAG\n"),
        ("runs --limit 5x", "--limit=5x: must be a whole number\n  fix: --limit 5\n"),
        ("data prepare a b --val-fraction 0.1x", "0.1x: must be a number\n  fix: --val-fraction 0.1\n"),
        ("status a --jsn", "--jsn: there is no such option\n  fix: did you mean --json?"),
        ("scale a four", "number=four: must be a whole number\n  fix: dtrain scale a NUMBER\n"),
        ("recipes shw", "action=shw: there is no such choice\n  fix: did you mean show? action can be ls, show, cp\n"),
        ("metrics", "ACTION: is missing\n  fix: dtrain metrics serve\n"),
        ("verify --kep", "--kep: there is no such option\n  fix: did you mean --keep?"),
        ("export a --output b", "--output: there is no such option\n  fix: dtrain export a b\n"),
        ("export a --format onnx --output-dir=b", "no such option\n  fix: dtrain export a --format onnx b\n"),
        ("export a b.pt", "is safetensors\n  fix: dtrain export a b.safetensors\n"),
        ("export a b.gguf", "is safetensors\n  fix: dtrain export a --format gguf b.gguf\n"),
        ("sample a def main", "main: is one argument too many\n  fix: dtrain sample a 'def main'\n"),
        ("runs --where optim.lr", "is not compared with anything\n  fix: --where 'optim.lr>VALUE', in quotes"),
    ],
)
def test_other_mistakes_have_a_fix(command: str, told: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(command.split()) == 2
    out, err = capsys.readouterr()
    assert not out and err.startswith("error: ") and told in err and "usage:" not in err


@pytest.mark.parametrize(
    ("typed", "fix"),
    [
        ("m.gguf", "--format gguf m.gguf"),
        ("m.onnx --ema", "--format onnx m --ema"),
        ("m.bin", "m.safetensors"),
        ("m.pt --ema", "m.safetensors --ema"),
    ],
)
def test_an_export_with_the_ending_of_another_format(typed: str, fix: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["export", "some-run", *typed.split()]) == 2
    assert capsys.readouterr().err.endswith(f"  fix: dtrain export some-run {fix}\n")
