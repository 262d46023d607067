"""What `guard` and `train.spike` cannot do is said before the launch, and the former name of a setting leads to it."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import yaml

from dtrain.checks import guard
from dtrain.cli import main
from dtrain.config import run_file
from tests.world import ROOT, make_run

REFUSED = [
    (["guard.replay_every=10", "strategy=zero2"], "guard.replay_every=10: strategy=zero2 cannot repeat a step"),
    (["guard.replay_every=-1"], "guard.replay_every=-1: must be at least 0"),
    (["guard.replicas_every=0.5"], "guard.replicas_every=0.5: must be a whole number"),
    (["train.spike=skip", "strategy=zero1"], "train.spike=skip: strategy=zero1 cannot skip"),
    (["train.spike=rollback", "checkpoint.every=0"], "checkpoint.every=0 saves none"),
    (["train.spike=back"], "must be one of stop, skip, rollback, null"),
]
ACCEPTED = [
    ["guard.replay_every=10", "strategy=fsdp", "train.spike=skip"],
    ["guard.replay_every=10", "strategy=zero2", "cluster.processes=1"],  # one rank has no engine
    ["train.spike=rollback", "strategy=zero1", "checkpoint.every=5"],
]


@pytest.mark.parametrize(("overrides", "message"), REFUSED, ids=[" ".join(o) for o, _ in REFUSED])
def test_refused_before_the_launch(overrides: list[str], message: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=message) as error:
        make_run(tmp_path / "run", "cluster.processes=2", *overrides)
    assert "\n  fix: " in str(error.value)


@pytest.mark.parametrize("overrides", ACCEPTED, ids=" ".join)
def test_accepted(overrides: list[str], tmp_path: Path) -> None:
    make_run(tmp_path / "run", "cluster.processes=2", *overrides)


def test_a_gpu_repeats_a_step_only_if_it_is_deterministic(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(guard, "gpus_per_node", lambda cluster: 1)
    with pytest.raises(ValueError, match="deterministic=true"):
        make_run(tmp_path / "run", "guard.replay_every=10")
    make_run(tmp_path / "run", "guard.replay_every=10", "deterministic=true")


def test_a_users_own_strategy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "own.py").write_text(
        "from dtrain.strategies.base import Strategy\n\nclass Own(Strategy):\n    def update(self, loss): ...\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    own = ["++strategy._target_=own.Own", "trust=[own]", "~strategy.bucket_mb"]
    with pytest.raises(ValueError, match="is your own"):
        make_run(tmp_path / "run", *own, "guard.replay_every=10")
    with pytest.raises(ValueError, match="does not look for spikes"):
        make_run(tmp_path / "run", *own, "train.spike=stop")


def test_the_former_name_is_refused_with_the_new_one(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["launch", "train.check_replicas_every=9", "dry_run=true"]) == 2
    assert "train.check_replicas_every: has another name now\n  fix: guard.replicas_every=…" in capsys.readouterr().err


@pytest.mark.parametrize(("old", "now"), [(7, 7), (0, 0), (None, 500)])
def test_an_old_run_resumes_with_the_same_meaning(
    old: int | None, now: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    run = Path(shutil.copytree(ROOT / "tests" / "old_runs" / "fsdp", "run"))
    (run / "launch.json").write_text('{"overrides": [], "launches": [{"time": "2026-11-14T10:00:00"}]}')
    config = yaml.safe_load((run / "config.yaml").read_text())
    if old is not None:
        config["train"]["check_replicas_every"] = old
    (run / "config.yaml").write_text(yaml.safe_dump(config))
    completed = run_file.completed(run_file.load(run))
    assert completed["guard"] == {"replicas_every": now, "replay_every": 0} and completed["train"]["spike"] is None
    assert main(["launch", "resume=run", "--cfg", "job"]) == 0
    shown = yaml.safe_load(capsys.readouterr().out)
    assert shown["guard"]["replicas_every"] == now and "check_replicas_every" not in shown["train"]
    assert main(["launch", "resume=run", "dry_run=true"]) == 0
