"""`dtrain explain`: every setting can be asked for, and names that other programs use lead to ours."""

from __future__ import annotations

import pytest

from dtrain import cli
from dtrain.config.files import GROUPS, known_settings, options_of


def explained(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    assert cli.main(["explain", *words]) == 0
    return capsys.readouterr().out


def test_a_setting_a_section_a_group_and_an_option(capsys: pytest.CaptureFixture[str]) -> None:
    assert "train.steps  (integer; default 300)\n  optimizer steps" in explained(capsys, "train.steps")
    assert "checkpoint.keep  (" in explained(capsys, "checkpoint")
    of_group = explained(capsys, "strategy")
    assert all(f"strategy={option}" in of_group for option in options_of("strategy"))
    assert "strategy.sharding" in explained(capsys, "strategy=fsdp")


def test_a_setting_that_means_something_else_under_another_option(capsys: pytest.CaptureFixture[str]) -> None:
    text = explained(capsys, "strategy.bucket_mb")
    assert "default 25" in text and "default 100" in text and "under strategy=zero1, strategy=zero2" in text


def test_a_part_of_a_name_finds_the_settings(capsys: pytest.CaptureFixture[str]) -> None:
    assert "schedule.warmup_steps: " in explained(capsys, "warmup")


def test_every_setting_and_every_option_can_be_asked_for(capsys: pytest.CaptureFixture[str]) -> None:
    words = [name for name in known_settings() if name != "hydra"]
    explained(capsys, *words, *(f"{group}={option}" for group in GROUPS for option in options_of(group)))


@pytest.mark.parametrize(
    ("word", "start"),
    [("fsdp", "strategy=fsdp: "), ("gpt2-124m", "model=gpt2-124m: "), ("model.gpt2-tiny", "model=gpt2-tiny: "),
     ("AdamW", "optim=adamw: "), ("val_loss", "val_loss: a metric"), ("tokens/s", "tokens_per_s: a metric")],
)  # fmt: skip
def test_an_option_alone_and_a_metric(word: str, start: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert explained(capsys, word).startswith(start)


@pytest.mark.parametrize(
    ("word", "fix"),
    [("fsdp2", "dtrain explain strategy=fsdp"), ("train.steps=5", "dtrain explain train.steps"),
     ("cosin", "did you mean dtrain explain schedule=cosine?"), ("val_los", "did you mean dtrain explain val_loss?")],
)  # fmt: skip
def test_the_hint_leads_to_an_answer(word: str, fix: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["explain", word]) == 2
    assert f"fix: {fix}\n" in capsys.readouterr().err


def test_an_unknown_word_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["explain", "train.stepz"]) == 2
    assert "train.steps" in capsys.readouterr().err


def test_a_name_of_another_program_is_answered_with_ours(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["explain", "learning_rate"]) == 2
    assert "fix: optim.lr=" in capsys.readouterr().err
