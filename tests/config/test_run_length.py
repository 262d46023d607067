"""train.epochs: exactly one length, the steps computed from the data, and the same total after a resume."""

from pathlib import Path
from typing import Any

import pytest

from dtrain.checks.resume import check_unfinished
from dtrain.config.run_file import read_run
from dtrain.config.run_length import check_reaches, keep_one_length, last_step, steps_of
from dtrain.launch.arguments import prepare_arguments
from dtrain.launch.attempts import is_done
from dtrain.launch.compose import compose
from dtrain.runs.folder import write_json
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
    keep_one_length(config, typed)
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
    assert steps_of(train | {"epochs": 1.1, "global_batch_size": 10}, 100, "d") == 11, "not 12"
    done = {"total_steps": 94, "epochs": 3}
    assert last_step(train, {}) is None and last_step(train | {"stop_after": 5}, done) == 5
    assert last_step(train, done) == 94 and last_step(train | {"epochs": 5}, done) is None
    assert last_step(train | {"steps": 7, "epochs": None}, done) == 7


def test_a_finished_run_with_more_epochs_is_not_done(tmp_path: Path) -> None:
    write_json(tmp_path / "summary.json", {"status": "done", "steps": 94, "total_steps": 94, "epochs": 3})
    config = {"train": {"steps": None, "epochs": 3, "stop_after": None}, "model": {}}
    assert is_done(tmp_path, config)
    config["train"]["epochs"] = 5
    assert not is_done(tmp_path, config)


@pytest.mark.parametrize("total, step, is_saved, ends", [(9, 8, False, True), (8, 8, True, True), (8, 8, False, False),
                                                         (7, 8, True, False), (1, 0, False, True)])  # fmt: skip
def test_epochs_that_end_before_the_checkpoint(total: int, step: int, is_saved: bool, ends: bool) -> None:
    config = {"train": {"epochs": 2}, "resume": "run"}
    if ends:
        return check_reaches(config, total, step, is_saved)
    with pytest.raises(
        ValueError, match=r"train.epochs=2: is [78] steps, counted from step 0.*\n  fix: train.epochs=[45]"
    ):
        check_reaches(config, total, step, is_saved)


def test_a_run_of_epochs_resumes_with_the_same_total(tmp_path: Path) -> None:
    words = (f"model={OWN}.Named", f"data={OWN}.Dicts", "train.epochs=1.1")  # 48 samples, batches of 8
    words += ("schedule.warmup_steps=77",)
    whole = own_run(tmp_path / "whole", 1, *words)
    found = summary(whole)
    assert (found["total_steps"], found["steps"], found["epochs"], found["samples_per_epoch"]) == (7, 7, 1.1, 48)
    first = own_run(tmp_path / "first", 2, *words, "train.stop_after=3")
    assert summary(first)["total_steps"] == 7
    again = own_run(first, 2, *words, "strategy=fsdp")
    assert losses(again).keys() == losses(whole).keys()
    assert max(abs(losses(again)[step] - losses(whole)[step]) for step in range(1, 8)) <= 1e-5
    log = (again / "logs" / "rank-0.log").read_text()
    assert "schedule.warmup_steps=77 is longer than the run, 7 steps of train.epochs=1.1" in log
    with pytest.raises(ValueError, match=r"the run has already done 7 steps\n  fix: train.epochs=2.2"):
        check_unfinished(read_run(again) | {"resume": str(again)}, again)
    own_run(again, 1, *words[:2], "train.epochs=0.5", code=2)
    log = (again / "logs" / "rank-0.log").read_text()
    assert "train.epochs=0.5: is 3 steps, counted from step 0 of the first run, and the checkpoint has 7" in log


def test_a_stream_without_a_length_needs_steps(tmp_path: Path) -> None:
    words = (f"model={OWN}.Net", "data=tests.data.streams.Endless", "loss=cross_entropy", "train.epochs=2")
    run = own_run(tmp_path / "run", 1, *words, code=2)
    assert "is a stream that does not say how many samples" in (run / "logs" / "rank-0.log").read_text()
