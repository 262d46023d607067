"""`dtrain search`: the space as Hydra writes it, a study that the same command goes on with, here and on SLURM."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import optuna
import pytest
from hydra.core.override_parser.overrides_parser import OverridesParser
from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution

from dtrain.cli import main
from dtrain.commands.search.request import read_request
from dtrain.commands.search.space import distribution
from dtrain.config.files import RECIPES
from tests import slurm
from tests.patience import patience, until
from tests.world import SMALL, summary

cluster = slurm.cluster
LR = "optim.lr=tag(log,interval(1e-3,1e-1))"
WORDS = [*SMALL, "train.eval_batches=2", "train.steps=6", "sampler=random", LR]


@pytest.mark.parametrize(
    ("typed", "want"),
    [
        (LR, FloatDistribution(1e-3, 1e-1, log=True)),
        ("optim.weight_decay=interval(0,0.1)", FloatDistribution(0, 0.1)),
        ("schedule.warmup_steps=int(interval(2,20))", IntDistribution(2, 20)),
        ("train.global_batch_size=range(8,64,8)", IntDistribution(8, 56, step=8)),
        ("strategy=ddp,fsdp", CategoricalDistribution(["ddp", "fsdp"])),
        ("compile=choice(true,false)", CategoricalDistribution([True, False])),
    ],
)
def test_a_space_is_what_hydra_writes(typed: str, want: Any) -> None:
    assert distribution(OverridesParser.create().parse_override(typed)) == want


@pytest.mark.parametrize(
    ("typed", "words"),
    [
        (["trials=5"], ("nothing varies", "interval")),
        ([LR, "trials=0"], ("trials=0", "at least 1")),
        ([LR, "trails=6"], ("trails: there is no such option", "did you mean trials=6?")),
        ([LR, "train.stpes=6"], ("train.stpes: there is no such setting", "did you mean train.steps")),
        (["optim.lr=1e-4..1e-1"], ("optim.lr=1e-4..1e-1", "'optim.lr=tag(log,interval(1e-4,1e-1))'")),
        (["model.num_layers=1..4"], ("fix: 'model.num_layers=interval(1,4)'",)),
        ([LR, "direction=up"], ("direction=up", "minimize or maximize")),
        ([LR, "direction=max"], ("direction=max", "fix: direction=maximize")),
        ([LR, "sampler=grid"], ("sampler=grid", "tpe or random")),
        (["strategy=glob(*)"], ("strategy", "cannot be searched")),
        (["optim.lr=interval(1,2"], ("optim.lr=interval(1,2", "not understood")),
        (["optim.lr=interval(1e-2,1e-3)"], ("optim.lr=interval(1e-2,1e-3)", "is not a search space")),
        (["optim.lr=tag(log,interval(0,1))"], ("optim.lr", "is not a search space")),
        ([LR, "metric=val_los"], ("metric=val_los", "val_loss")),
        (["recipe=./theirs.yaml", LR], ("search.space=cluster.setup", "must vary")),
        ([LR, "-x"], ("-x", "key=value")),
    ],
)
def test_mistakes_are_explained_and_leave_nothing(
    typed: list[str], words: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    monkeypatch.chdir(tmp_path)
    theirs = tmp_path / "theirs.yaml"  # a recipe from elsewhere must not type what a recipe may not say
    theirs.write_text("search:\n  space: ['cluster.setup=[touch canary]']\n")
    assert main(["search", *typed]) == 2
    error = capsys.readouterr().err
    assert all(word in error for word in (*words, "fix: ")), error
    assert list(tmp_path.iterdir()) == [theirs]


def test_the_recipe_holds_a_search_and_what_is_typed_wins() -> None:
    assert "search:" in (RECIPES / "search-lr.yaml").read_text()
    request = read_request(["recipe=search-lr", "trials=3", "optim.lr=1e-3,2e-3"])
    assert request.options["trials"] == "3" and request.options["metric"] == "val_loss"
    assert {o.key_or_group: distribution(o) for o in request.space} == {
        "optim.lr": CategoricalDistribution([1e-3, 2e-3]),
        "schedule.warmup_steps": IntDistribution(2, 20),
    }
    assert request.fixed == ["recipe=search-lr"]


def search(cwd: Path, *words: str, env: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "dtrain", "search", *WORDS, *words]
    return subprocess.run(command, cwd=cwd, env=env, capture_output=True, text=True, timeout=patience(120))


def trials_of(folder: Path) -> list[optuna.trial.FrozenTrial]:
    backend = optuna.storages.journal.JournalFileBackend(str(folder / "study.journal"))
    study = optuna.load_study(study_name="search", storage=optuna.storages.JournalStorage(backend))
    return study.trials


def test_the_same_command_goes_on_with_the_study(tmp_path: Path) -> None:
    first = search(tmp_path, "trials=1", "cluster.processes=1")
    assert first.returncode == 0, first.stdout + first.stderr
    (folder,) = tmp_path.glob("multirun/*/*-search")
    again = search(tmp_path, "trials=2", "cluster.processes=1")
    assert again.returncode == 0, again.stdout + again.stderr
    assert list(tmp_path.glob("multirun/*/*-search")) == [folder]
    trials = trials_of(folder)
    assert [trial.number for trial in trials] == [0, 1]
    assert trials[0].params != trials[1].params, "a study that goes on draws something new"
    for trial in trials:
        (run,) = folder.glob(f"{trial.number}-*")
        assert trial.value == summary(run)["val_loss"]
    best = min(trials, key=lambda t: t.value or 0.0)
    assert f"best: trial {best.number}," in again.stdout and "← best" in again.stdout


def test_a_setting_that_every_trial_would_refuse_ends_the_search(tmp_path: Path) -> None:
    done = search(tmp_path, "trials=3", "train.global_batch_size=7", "cluster.processes=2")
    assert done.returncode == 2 and "train.global_batch_size=7" in done.stderr
    assert done.stdout.count("trial ") == 1


def test_a_point_that_is_refused_is_a_trial_that_came_to_nothing(tmp_path: Path) -> None:
    """Once others were accepted: a search over sizes may go where a model does not fit."""
    done = search(tmp_path, "trials=2", "train.global_batch_size=choice(7,8)", "cluster.processes=2")
    states = [trial.state.name for folder in tmp_path.glob("multirun/*/*-search") for trial in trials_of(folder)]
    assert states == ["COMPLETE", "FAIL"], f"seed 0 draws 8, then 7\n{done.stdout}{done.stderr}"
    assert done.returncode == 0 and "trial 1: refused" in done.stdout and "best: trial 0" in done.stdout


def test_on_slurm_it_goes_on_without_the_terminal(tmp_path: Path, cluster: slurm.Cluster) -> None:
    where = ["cluster=slurm", "cluster.gpus_per_node=0", "preflight=off"]
    done = search(tmp_path, "trials=2", "parallel=2", *where, env=cluster.client_env())
    assert done.returncode == 0 and "in the background" in done.stdout, done.stdout + done.stderr
    (folder,) = tmp_path.glob("multirun/*/*-search")
    log = folder / "search.log"
    ended = "best: trial"
    until(lambda: ended in log.read_text(), ended, 90, lambda: log.read_text() + cluster.state())
    assert sorted(trial.value for trial in trials_of(folder)) == sorted(  # type: ignore[type-var]
        summary(run)["val_loss"] for run in folder.glob("[01]-*")
    )
