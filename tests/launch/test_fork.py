"""fork=RUN@STEP and resume=RUN@STEP: what is taken over, what is refused, and that nothing of a run is lost."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest

from dtrain.commands.verify.compare import SMALL
from dtrain.config import run_file
from dtrain.launch.app import main
from dtrain.runs.folder import checkpoints, read_json
from tests.world import losses, summary

# six steps, the best evaluation first: the learning rate rises far too high
SETTINGS = (
    *SMALL, "cluster.processes=1", "train.steps=6", "train.eval_every=2", "checkpoint.every=2", "checkpoint.keep=2",
    "checkpoint.keep_best=val_loss", "schedule.warmup_steps=6", "optim.lr=1", "train.log_every=1",
)  # fmt: skip


@pytest.fixture(scope="module")
def parent(tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = tmp_path_factory.mktemp("parent") / "run"
    assert main([*SETTINGS, f"run_dir={run}", "name=base", "tags=[base]"]) == 0
    return run


def content(folder: Path) -> dict[str, str]:
    files = [path for path in sorted(folder.rglob("*")) if path.is_file()]
    return {str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def steps_of(run: Path) -> list[int]:
    return [int(path.name[5:]) for path in checkpoints(run / "checkpoints")]


def refused(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    capsys.readouterr()
    assert main(list(words)) == 2
    return capsys.readouterr().err


def test_the_best_checkpoint_is_kept_and_the_rest_is_pruned(parent: Path) -> None:
    rows = [json.loads(line) for line in (parent / "metrics.jsonl").read_text().splitlines()]
    found = {row["step"]: row["val_loss"] for row in rows if "val_loss" in row}
    best = min(found, key=lambda step: found[step])
    assert best == 2, "the test needs a best checkpoint that is older than those which are kept anyway"
    assert steps_of(parent) == [6, 4, 2]
    assert summary(parent)["best"] == {"step": best, "metric": "val_loss", "value": found[best]}
    manifest = json.loads((parent / "checkpoints" / "step-00000002" / "manifest.json").read_text())
    assert manifest["metrics"]["val_loss"] == found[2]


def test_a_fork_with_the_same_settings_computes_the_same_and_leaves_its_parent_alone(
    parent: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = content(parent)
    child = tmp_path / "child"
    assert main([f"fork={parent}@4", f"run_dir={child}"]) == 0
    said = capsys.readouterr().out
    assert "with its weights, optimizer state, data position, step" in said
    assert "the learning-rate schedule continues at step" in said and "resuming from step" in said
    assert content(parent) == before
    assert losses(child) == losses(parent), "with those before the fork"
    assert summary(child)["weights_sha256"] == summary(parent)["weights_sha256"]
    assert summary(child)["start_step"] == 4
    origin = {"run": str(parent), "id": read_json(parent / "launch.json")["id"], "step": 4}
    assert summary(child)["forked_from"] == origin == read_json(child / "launch.json")["forked_from"]
    assert read_json(child / "launch.json")["id"] != origin["id"]
    # a fork of the fork, with another optimizer and other data; the best one of the child is its parent's
    grandchild = tmp_path / "grandchild"
    words = ["optim=sgd", "optim.lr=0.01", "data.seed=5", "train.steps=8", f"run_dir={grandchild}"]
    assert main([f"fork={child}@6", *words]) == 0
    names = [run_file.load(run)["name"] for run in (parent, child, grandchild)]
    assert names == ["base", "base-fork", "base-fork"], "the old name still means the old run"
    said = capsys.readouterr().out
    assert "with its weights, step; another optimizer starts anew; other data is read from its start" in said
    found = summary(grandchild)
    assert found["start_step"] == 6 and found["steps"] == 8
    assert found["forked_from"]["run"] == str(child) and found["forked_from"]["forked_from"] == origin
    assert f"{child}@6 ← {parent}@4" in said.replace("\n", "")
    assert {step: loss for step, loss in losses(grandchild).items() if step <= 6} == losses(child)
    # it is a run like any other: without its first checkpoint too
    assert main([f"resume={grandchild}", "train.steps=9", "resume_allow=[train.steps]"]) == 0
    assert summary(grandchild)["start_step"] == 8
    assert read_json(grandchild / "launch.json")["forked_from"] == found["forked_from"]


def test_what_a_fork_refuses(parent: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before, run_dir = content(parent), f"run_dir={tmp_path / 'child'}"
    for words, said in {
        (f"fork={parent}@4", "model.num_layers=1"): "a fork keeps the weights, and so the model",
        (f"fork={parent}@4", "lora.rank=2"): f"the weights alone: init_from={parent}/checkpoints/step-00000004 instead",
        (f"fork={parent}@4", f"init_from={parent}"): "the weights come from the checkpoint of the fork",
        (f"fork={parent}",): "train.steps=6: the fork begins at step 6\n  fix: train.steps=12",
        (f"fork={parent}@3",): "it has 2, 4, 6",
        (f"fork={parent}@4", "recipe=cpu-tiny"): "leave out recipe=",
        (f"fork={parent}@4", f"resume={parent}"): "leave out one of them",
    }.items():
        assert said in refused(capsys, *words, run_dir), words
    assert not (tmp_path / "child").exists() and content(parent) == before


def test_a_launch_that_was_killed_before_it_had_the_checkpoint(
    parent: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The checkpoint comes last: metrics alone are no fork."""
    child = tmp_path / "child"
    with monkeypatch.context() as patch:
        patch.setattr(shutil, "copytree", lambda *_, **__: os.kill(os.getpid(), signal.SIGKILL))
        process = os.fork()
        if process == 0:
            main([f"fork={parent}@4", f"run_dir={child}", "train.steps=8"])
            os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]) == -signal.SIGKILL
    assert losses(child) and not steps_of(child) and (child / "launch.json").exists()
    error = refused(capsys, f"resume={child}")
    assert "not even the checkpoint that it was forked from" in error and f"fix: fork={parent}@4, " in error
    assert main([f"fork={parent}@4", f"run_dir={tmp_path / 'other'}", "train.steps=8"]) == 0


def test_a_run_does_not_resume_in_another_folder(
    parent: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = content(parent)
    error = refused(capsys, f"resume={parent}", f"run_dir={tmp_path / 'other'}", "train.steps=9")
    assert f"fix: fork={parent} run_dir={tmp_path / 'other'}" in error
    assert content(parent) == before and not (tmp_path / "other").exists()
    fix = error.partition("fix: ")[2].partition(", or")[0].split()
    assert main([*fix, "train.steps=7"]) == 0, "the fix works as printed"
    assert content(parent) == before


def test_go_back_to_a_step(parent: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = tmp_path / "run"
    shutil.copytree(parent, run)
    newer = content(run / "checkpoints" / "step-00000006")
    lines = (run / "metrics.jsonl").read_text()
    damaged = run / "checkpoints" / "step-00000004" / "rank-00000.safetensors"
    whole = damaged.read_bytes()
    damaged.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    assert main([f"resume={run}@4"]) == 3
    assert "cannot be used" in read_json(run / "failure.json")["message"]
    assert steps_of(run) == [6, 4, 2] and not list(run.glob("checkpoints/replaced-*")), "nothing was moved"
    damaged.write_bytes(whole)
    capsys.readouterr()
    assert main([f"resume={run}@best"]) == 0
    assert "going back to step 2: 2 newer checkpoints and the metrics after it are moved to" in capsys.readouterr().out
    assert summary(run)["start_step"] == 2
    assert summary(run)["weights_sha256"] == summary(parent)["weights_sha256"] and losses(run) == losses(parent)
    aside = run / "checkpoints" / "replaced-1"
    assert content(aside / "step-00000006") == newer and (aside / "step-00000004").is_dir()
    assert (aside / "metrics.jsonl").read_text() == lines
    assert steps_of(run) == [6, 4, 2], "saved again"
    assert "has already done" in refused(capsys, f"resume={run}"), "a plain resume is from the newest, as ever"


def test_a_launch_that_ended_before_it_went_back_is_forgotten(
    parent: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    shutil.copytree(parent, run)
    (run / "checkpoints" / "go-back.json").write_text('{"step": 2}')
    assert main([f"resume={run}", "train.steps=7", "resume_allow=[train.steps]"]) == 0
    assert summary(run)["start_step"] == 6


def test_a_run_that_only_measures(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    settings: list[Any] = [*SMALL, "cluster.processes=1", "train.steps=2", "checkpoint=none"]
    for more, said in {
        "checkpoint.keep_best=val_loss": "there is no checkpoint to keep",
        "checkpoint.peer=true": "copies in memory are checkpoints",
        "train.spike=rollback": "goes back to a checkpoint",
        "cluster.processes=1:2": "ranks that leave or join need a checkpoint",
    }.items():
        assert said in refused(capsys, *settings, more)
    run = tmp_path / "run"
    assert main([*settings, f"run_dir={run}"]) == 0
    out = capsys.readouterr().out
    assert summary(run)["weights_sha256"] is None and summary(run)["val_loss"] and not steps_of(run)
    assert "dtrain export" not in out and "resume=" not in out and "dtrain evaluate" not in out
    assert "saves no checkpoint" in refused(capsys, f"resume={run}", "train.steps=4", "resume_allow=[train.steps]")
    assert "the run has no checkpoint" in refused(capsys, f"fork={run}")
