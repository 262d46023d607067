"""train.epochs: exactly one length, the steps computed from the data, and the same total after a resume."""

from pathlib import Path
from typing import Any

import pytest

from dtrain.checks.resume import check_unfinished
from dtrain.config.run_file import read_run
from dtrain.config.run_length import last_step, settle, steps_of
from dtrain.launch.arguments import prepare_arguments
from dtrain.launch.compose import compose
from tests.own_runs import own_run
from tests.world import losses, summary

OWN = "tests.data.own_data"


@pytest.mark.parametrize(
    "stored, typed, expected",
    [
        ((300, None), [], (300, None)),
        ((300, 3), ["train.epochs=3"], (None, 3)),
        ((None, 3), [], (None, 3)),  # a resumed run
        ((50, 3), ["train.steps=50"], (50, None)),  # of a recipe with epochs
        ((None, 3), ["train.steps=null", "train.epochs=3"], (None, 3)),
    ],
)
def test_one_of_the_two_counts(stored: Any, typed: list[str], expected: Any) -> None:
    config = {"train": {"steps": stored[0], "epochs": stored[1]}}
    settle(config, typed)
    assert (config["train"]["steps"], config["train"]["epochs"]) == expected


@pytest.mark.parametrize(
    "words, message",
    [
        (["train.epochs=3", "train.steps=5"], r"train.epochs=3: train.steps=5 is given, too.*\n  fix: leave out"),
        (["train.steps=null"], r"train.steps=null: a run needs a length\n  fix: train.steps=300, or train.epochs=3"),
        (["train.epochs=many"], r"train.epochs=many: must be a number"),
    ],
)
def test_anything_else_is_refused(words: list[str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        compose(prepare_arguments(words))


def test_steps_of_epochs() -> None:
    train = {"steps": None, "epochs": 3, "global_batch_size": 32, "stop_after": None}
    assert steps_of(train, 1000, "d") == 94 and steps_of(train | {"epochs": 0.001}, 1000, "d") == 1
    assert steps_of(train | {"epochs": None, "steps": 7}, None, "d") == 7
    with pytest.raises(ValueError, match=r"data=d is a stream.*\n  fix: train.steps="):
        steps_of(train, None, "d")
    assert last_step(train, {}) is None and last_step(train | {"stop_after": 5}, {"total_steps": 94}) == 5
    assert last_step(train, {"total_steps": 94}) == 94


def test_a_run_of_epochs_resumes_with_the_same_total(tmp_path: Path) -> None:
    words = (f"model={OWN}.Named", f"data={OWN}.Dicts", "train.epochs=1.1")  # 48 samples, batches of 8
    whole = own_run(tmp_path / "whole", 1, *words)
    found = summary(whole)
    assert (found["total_steps"], found["steps"], found["epochs"], found["samples_per_epoch"]) == (7, 7, 1.1, 48)
    first = own_run(tmp_path / "first", 2, *words, "train.stop_after=3")
    assert summary(first)["total_steps"] == 7
    again = own_run(first, 2, *words, "strategy=fsdp")
    assert losses(again).keys() == losses(whole).keys()
    assert max(abs(losses(again)[step] - losses(whole)[step]) for step in range(1, 8)) <= 1e-5
    with pytest.raises(ValueError, match=r"the run has already done 7 steps\n  fix: train.epochs=2.2"):
        check_unfinished(read_run(again) | {"resume": str(again)}, again)


def test_a_stream_without_a_length_needs_steps(tmp_path: Path) -> None:
    words = (f"model={OWN}.Net", "data=tests.data.streams.Endless", "loss=cross_entropy", "train.epochs=2")
    run = own_run(tmp_path / "run", 1, *words, code=2)
    assert "is a stream that does not say how many samples" in (run / "logs" / "rank-0.log").read_text()
