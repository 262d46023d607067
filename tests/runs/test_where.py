"""--where finds runs by results, settings, tags and dates; what it cannot read or does not know is an error."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dtrain.commands.runs import main
from dtrain.runs import tags
from dtrain.runs.where import parse
from tests import rundirs
from tests.rundirs import make

in_tmp_path = rundirs.in_tmp_path


@pytest.fixture
def runs() -> dict[str, Path]:
    choices = {"data": "stdlib", "loss": "own"}
    common: dict[str, Any] = {"status": "done", "model": "gpt2-124m", "steps": 100, "parameters": 124_000_000}
    config = "optim: {{lr: {}}}\ndeterministic: {}\nlora: {{targets: [q, v]}}\n"
    return {
        "a": make("outputs/d/a", time="2026-01-05T10:00:00+0000", config=config.format(0.001, "true"),
                  launch={"launches": [{"time": "2026-01-05T10:00:00+0000", "choices": choices}]},
                  strategy="fsdp", val_loss=1.5, mesh={"dp": 2}, **common),
        "b": make("outputs/d/b", time="2026-01-06T10:00:00+0000", config=config.format(0.01, "false"),
                  strategy="ddp", val_loss=2.5, tokens_per_s=9.0, train_loss=2.4, mfu=0.2, val_accuracy=0.9, **common),
        "c": make("outputs/d/c", time="2026-01-07T10:00:00+0000", config=config.format(0.1, "false"),
                  strategy="ddp", val_loss=None, **common | {"status": "failed"}),
    }  # fmt: skip


def found(capsys: pytest.CaptureFixture[str], text: str) -> str:
    capsys.readouterr()
    assert main(["--where", text, "--json"]) == 0, capsys.readouterr().err
    return "".join(sorted(Path(run["path"]).name for run in json.loads(capsys.readouterr().out)))


def test_what_is_found(runs: dict[str, Path], capsys: pytest.CaptureFixture[str]) -> None:
    tags.change(runs["a"], add=["good", "baseline"])
    tags.change(runs["b"], add=["good"])
    for text, expected in {
        "val_loss<2 and strategy=fsdp": "a",
        "val_loss<2 or strategy=ddp": "abc",
        "val_loss<2 or val_loss>2 and status=failed": "a",
        "(val_loss<2 or val_loss>2) and not strategy=fsdp": "b",
        "val_loss>=1.5": "ab",
        "val_loss!=1.5": "bc",
        "val_loss=null": "c",
        "NOT val_loss = null": "ab",
        "optim.lr>=1e-2": "bc",
        "optim.lr == 0.01": "b",
        "deterministic=true": "a",
        "lora.targets=q": "abc",
        "mesh.dp=2": "a",
        "data=stdlib": "a",
        "model=gpt2-124m and parameters<124.5M": "abc",
        "tag=good and tag!=baseline": "b",
        "tag~base": "a",
        "model~GPT2": "abc",
        "started>2026-01-06": "bc",
        "started<2026-01-06T09:00:00+00:00": "a",
        "age>1d and age<5000w": "abc",
        "name='a'": "a",
        "val loss<2 & strategy=fsdp": "a",
        "val loss<2 || strategy=ddp": "abc",
        "not train loss<2 and tok/s>5 and MFU>0.1 and accuracy>0.5": "b",
    }.items():
        assert found(capsys, text) == expected, text
    assert main(["--where", "val_loss<0"]) == 0
    assert "none of 3 runs meets it" in capsys.readouterr().out


def test_text_among_numbers_is_no_error(runs: dict[str, Path], capsys: pytest.CaptureFixture[str]) -> None:
    """A run in which the same name is text does not meet the comparison; an error is only what fits no run."""
    make("outputs/d/e", time="2026-01-08T10:00:00+0000", val_loss="nan", config="optim: {lr: auto}", status="done")
    assert found(capsys, "optim.lr>=1e-2") == "bc" and found(capsys, "val_loss<2") == "a"
    assert found(capsys, "optim.lr=auto or val_loss<2") == "ae"
    assert main(["--where", "optim.lr<auto"]) == 2 and main(["--where", "status<2"]) == 2


def test_what_is_refused(runs: dict[str, Path], capsys: pytest.CaptureFixture[str]) -> None:
    for text, said in {
        "val_los<2": "--where=val_los<2: no run has val_los\n  fix: did you mean val_loss?",
        "loss<2": "loss is text (own)\n  fix: val_loss<2, or train_loss<2",
        "optim.lrr<2": "did you mean optim.lr",
        "learning_rate<1": "optim.lr",
        "good": "good is not compared with anything\n  fix: tag=good",
        "val_loss<": "val_loss< has no value",
        "val_loss<2 strategy=fsdp": "expected `and` or `or` before 'strategy'",
        "(val_loss<2": "a parenthesis is not closed",
        "and val_loss<2": "expected a name before 'and'",
        "": "expected a name at the end",
        "val_loss<'2": "cannot be read",
        "val_loss<low": "val_loss is a number (",
        "strategy<5": "strategy is text (",
        "age<2": "age is a number",
        "__import__('os').system('x')=1": "is not compared with anything",
    }.items():
        capsys.readouterr()
        assert main(["--where", text]) == 2, text
        assert said in (error := capsys.readouterr().err) and "\n  fix: " in error, (text, error)
    assert main(["a", "--where", "val_loss<2"]) == 2


@given(st.text("abcv_.<>=!~()'\" 0129e-", max_size=40))
def test_any_text_is_read_or_refused(text: str) -> None:
    try:
        condition, comparisons = parse(text)
    except ValueError as error:
        assert "\n  fix: " in str(error)
    else:
        assert comparisons and condition(lambda name: None) in (True, False)


def test_tags_and_notes(runs: dict[str, Path], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["tag", "outputs/d/a", "good", "baseline"]) == 0
    assert main(["tag", "outputs/d/a", "good", "v2"]) == 0
    assert main(["untag", "outputs/d/a", "baseline"]) == 0
    assert main(["note", "outputs/d/a", "the rate", "was too high"]) == 0
    assert tags.tags_of(runs["a"]) == ["good", "v2"]
    capsys.readouterr()
    assert main(["outputs/d/a"]) == 0
    out = capsys.readouterr().out
    assert "tags             good v2" in out and "the rate was too high" in out
    assert main([]) == 0
    assert "good v2" in capsys.readouterr().out
    for words in (["tag", "latest", "two words"], ["note", "latest", " "], ["tag", "latest", "x" * 65]):
        assert main(words) == 2
        assert "\n  fix: " in capsys.readouterr().err
    # a file of someone else
    (runs["b"] / tags.FILE).write_text('{"tags": ["ok", 3, "\\u001b[31m"], "notes": [7, {"text": "a\\u001b[31mb"}]}')
    assert tags.tags_of(runs["b"]) == ["ok"] and tags.notes_of(runs["b"])[1][1] == "ab"
