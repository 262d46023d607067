"""`resume=RUN`: the settings a launch takes from the run, and those that may change. Nothing is trained."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import stat
from pathlib import Path
from typing import Any

import pytest
from hydra.core.config_store import ConfigStore
from omegaconf import OmegaConf

from dtrain.launch import resume_arguments
from dtrain.launch.local import Local
from tests.launch.dry_launches import read, refused, run, started
from tests.test_bad_inputs import COMPOSE_ONCE

__all__ = ["started"]


@pytest.fixture(scope="module")
def template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that was launched once; made once, because composing takes a quarter of a second."""
    folder = tmp_path_factory.mktemp("template")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(*COMPOSE_ONCE)
        patch.chdir(folder)
        patch.setenv("CUDA_VISIBLE_DEVICES", "")
        patch.setattr(Local, "launch", lambda self, run_dir: 0)
        run("run_dir=run", "train.steps=9", "train.stop_after=4", "optim.lr=0.25", "schedule=linear")
    return folder / "run"


@pytest.fixture
def old(template: Path, tmp_path: Path) -> Path:
    copy = shutil.copytree(template, tmp_path / "old, with = odd 'signs'")
    os.chmod(copy, 0o755)
    return copy


def test_a_resume_goes_on_in_its_folder_with_its_own_settings(old: Path, template: Path, started: list[Path]) -> None:
    before = read(old)
    run(f"resume={old}")
    assert started == [old]
    after = read(old)
    assert after.pop("resume") == str(old)
    assert before.pop("resume") is None
    assert (before.pop("run_dir"), after.pop("run_dir")) == (str(template), str(old)), "it may have been moved"
    assert (before["train"].pop("stop_after"), after["train"].pop("stop_after")) == (4, None), "it meant that launch"
    assert after == before
    assert len(json.loads((old / "launch.json").read_text())["launches"]) == 2
    assert stat.S_IMODE(old.stat().st_mode) == 0o700


def test_the_classes_of_a_run_named_again_keep_their_arguments(started: list[Path], tmp_path: Path) -> None:
    """Another class has its own defaults; what is typed beside the class changes."""
    own = ["model=tests.data.own_data.Net", "data=tests.data.own_data.Drawing", "loss=cross_entropy"]
    run(*own, "model.inputs=16", "data.num=24", "run_dir=run", "train.steps=4")
    run("resume=run", *own)
    config = read(tmp_path / "run")
    assert len(started) == 2 and config["model"] == {"_target_": "tests.data.own_data.Net", "inputs": 16}
    run("resume=run", *own, "data.num=32", "resume_allow=[data.num]")
    assert read(tmp_path / "run")["data"]["num"] == 32
    words = ["model=tests.data.own_data.Named", own[1], "strategy=ddp"]
    given = dict(word.split("=") for word in words)
    assert resume_arguments.without_same_classes(words, given, tmp_path / "run") == (
        [words[0], "strategy=ddp"], ["model", "strategy"]
    )  # fmt: skip


@pytest.mark.parametrize("word", ["latest", "= odd 'sig"])
def test_a_resume_by_name(old: Path, started: list[Path], word: str, tmp_path: Path) -> None:
    (tmp_path / "outputs").mkdir()
    moved = old.rename(tmp_path / "outputs" / old.name)
    run(f"resume={word}")
    assert started == [moved]


def test_how_a_run_is_run_may_change_on_resume(old: Path, started: list[Path]) -> None:
    run(
        f"resume={old}", "strategy=fsdp", "strategy.sharding=grad_op", "cluster.processes=4", "compile=true",
        "checkpoint.every=1", "train.micro_batch_size=2", "train.stop_after=8", "logger=wandb", "logger.mode=offline",
        "activation_checkpointing=full",
    )  # fmt: skip
    config = read(old)
    assert started == [old]
    assert config["choices"]["strategy"] == "fsdp" and config["choices"]["schedule"] == "linear"
    assert config["strategy"]["sharding"] == "grad_op" and "bucket_mb" not in config["strategy"]
    assert config["train"]["stop_after"] == 8 and config["train"]["steps"] == 9
    run(f"resume={old}", "strategy=ddp")
    assert read(old)["strategy"]["bucket_mb"] == 25
    assert read(old)["cluster"]["processes"] == 4, "what the last launch set stays"


@pytest.mark.parametrize(
    ("change", "shown"),
    [
        ("train.steps=20", "train.steps: 9 → 20"),
        ("schedule=cosine", "schedule._target_: dtrain.optim.schedule.linear → dtrain.optim.schedule.cosine"),
    ],
)
def test_what_is_computed_may_change_only_by_name(
    old: Path, started: list[Path], change: str, shown: str, capsys: pytest.CaptureFixture[str]
) -> None:
    before = (old / "config.yaml").read_bytes()
    text = refused(capsys, f"resume={old}", change)
    assert f"    {shown}\n" in text
    assert started == [] and (old / "config.yaml").read_bytes() == before
    allow = text.rsplit("'", 2)[1]  # exactly what the message says
    assert allow.startswith("resume_allow=[")
    run(f"resume={old}", change, allow)
    assert started == [old]


def test_a_resume_does_not_depend_on_what_the_defaults_are_today(old: Path, started: list[Path]) -> None:
    """As if conf/ had said something else when the run was made. Its recipe is not asked, either."""
    config = OmegaConf.load(old / "config.yaml")
    config.train.seed, config.optim.lr, config.model.dropout = 77, 0.25, 0.5
    OmegaConf.save(config, old / "config.yaml")
    run(f"resume={old}")
    after = read(old)
    assert (after["train"]["seed"], after["optim"]["lr"], after["model"]["dropout"]) == (77, 0.25, 0.5)


def test_a_resume_can_be_a_dry_run(old: Path, started: list[Path], capsys: pytest.CaptureFixture[str]) -> None:
    before = (old / "config.yaml").read_bytes()
    run(f"resume={old}", "--dry-run", "cluster.processes=4")
    out = capsys.readouterr().out
    assert "--nproc-per-node=4" in out and shlex.split(out)[-1] == str(old)
    assert started == [] and (old / "config.yaml").read_bytes() == before


def saved(run_dir: Path, step: int) -> None:
    """As if the run had saved there."""
    folder = run_dir / "checkpoints" / f"step-{step:08d}"
    folder.mkdir(parents=True)
    (folder / "manifest.json").write_text("{}")


def test_a_resume_without_a_checkpoint_says_where_it_begins(
    old: Path, started: list[Path], capsys: pytest.CaptureFixture[str]
) -> None:
    said = f"{old.name} has no checkpoint yet, so the run starts again from step 1\n"
    run(f"resume={old}", "dry_run=true")
    assert said in capsys.readouterr().err
    run(f"resume={old}")
    assert said in capsys.readouterr().out
    saved(old, 4)
    run(f"resume={old}")  # the header has the step
    assert "no checkpoint" not in capsys.readouterr().out
    assert started == [old, old]


@pytest.mark.parametrize(
    "words, complaint",
    [
        (["profile=torch", "profile.start=4"], "the run ends after 9 steps, and step 10 is the last one to record"),
        (["profile=torch", "profile.start=4"], "fix: profile.start=3, or train.steps=10 'resume_allow=[train.steps]'"),
        (["profile=torch", "profile.start=5", "train.stop_after=8"],
         "fix: profile.start=3 profile.num_steps=1, or train.stop_after=11"),
        (["nsys=true", "profile.start=6", "profile.num_steps=1"], "step 10 is the last one to record"),
        (["profile.start=3"], "profile.start=3: profile=none records nothing"),
    ],
)  # fmt: skip
def test_a_profile_that_a_resume_cannot_reach_is_refused(
    old: Path, started: list[Path], words: list[str], complaint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    saved(old, 4)
    assert complaint in refused(capsys, f"resume={old}", *words)
    assert started == []


def test_a_resume_that_reaches_its_profile_is_not_refused(old: Path, started: list[Path]) -> None:
    saved(old, 4)
    run(f"resume={old}", "profile=torch", "profile.start=3", "profile.num_steps=3")
    assert started == [old]
    saved(old, 8)
    run(f"resume={old}")  # nothing of a profile is typed: it is no reason not to end the run
    assert started == [old, old]


@pytest.mark.parametrize("damage", ["", "- a list\n", "train: [1\n", "just words\n", None])
def test_a_run_with_a_damaged_config_is_refused(
    old: Path, started: list[Path], damage: str | None, capsys: pytest.CaptureFixture[str]
) -> None:
    (old / "config.yaml").unlink()
    if damage is not None:
        (old / "config.yaml").write_text(damage)
    text = refused(capsys, f"resume={old}")
    assert "resume=" in text and "config.yaml" in text and "  fix: " in text and "Traceback" not in text
    assert started == []


def test_a_run_folder_cannot_either(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "evil_too.py").write_text("open('was-imported', 'w').close()\nclass Thing: pass\n")
    config: dict[str, Any] = {"train": {"steps": 3}, "hydra": {"callbacks": {"x": {"_target_": "evil_too.Thing"}}}}
    run_dir = tmp_path / "run"
    run_dir.mkdir()
    OmegaConf.save(OmegaConf.create(config), run_dir / "config.yaml")
    with pytest.raises(ValueError, match=r"hydra\.callbacks\.x\._target_"):
        resume_arguments.store_as_run(run_dir, [])
    config |= {"hydra": {"searchpath": ["."]}, "defaults": [{"override hydra/launcher": "evil"}]}
    OmegaConf.save(OmegaConf.create(config), run_dir / "config.yaml")
    resume_arguments.store_as_run(run_dir, [])
    stored = ConfigStore.instance().load("recipe/as-run.yaml").node
    assert "hydra" not in stored and not any("hydra" in str(entry) for entry in stored.defaults)
