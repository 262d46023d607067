"""What trackers are told about a run, from files that may be damaged or someone else's."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from dtrain.launch.python_objects import spell
from dtrain.loggers import wandb
from dtrain.loggers.tracker import RunFacts
from tests.loggers.test_follow import make_run


def test_the_facts_of_a_run(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    (run / "checkpoints" / "step-00000007").mkdir(parents=True)
    (run / "checkpoints" / "step-00000007" / "manifest.json").touch()
    (run / "plan.json").write_text(json.dumps({"tokens_per_s": 5.0}))
    facts = RunFacts.read(run)
    assert (facts.id, facts.name, facts.group, facts.status) == ("0123456789abcdef", "run", None, "running")
    assert facts.tags["choices.model"] == "gpt2-tiny" and facts.tags["command"] == "dtrain launch"
    assert facts.tags["checkpoint"] == str(run / "checkpoints" / "step-00000007") and facts.plan == {
        "tokens_per_s": 5.0
    }
    assert facts.settings() == {"name": "run", "train.steps": 9, "logger": {}}


def test_a_job_of_a_sweep_belongs_to_its_group(tmp_path: Path) -> None:
    (tmp_path / "10-00-00").mkdir()
    (tmp_path / "10-00-00" / "sweep.json").write_text("{}")
    first, second = (RunFacts.read(make_run(tmp_path / "10-00-00" / name)) for name in ("0-lr=1", "1-lr=2"))
    assert (first.group, first.name, second.name) == ("10-00-00", "0-lr=1", "1-lr=2")
    assert first.tags["sweep"] == str(tmp_path / "10-00-00")


@pytest.mark.parametrize("launch", ["{", "[]", '{"id": "../../x", "launches": 3}', '{"id": 5}', '{"id": "x\' OR 1=1"}'])
def test_a_damaged_launch_file_gives_an_id_from_the_path(launch: str, tmp_path: Path) -> None:
    run = make_run(tmp_path / "a run")
    (run / "launch.json").write_text(launch)
    found = RunFacts.read(run)
    assert found.id.endswith("a-run") and found.id.replace("-", "").replace("_", "").isalnum() and len(found.id) <= 64


def test_a_cut_off_file_of_wandb_is_read_up_to_there(tmp_path: Path) -> None:
    pytest.importorskip("wandb")
    for name, content in (
        ("empty", b""),
        ("other", b"text" * 9),
        ("head", b":W&B\xe1\xbe\x00"),
        ("zeros", b":W&B" + bytes(99)),
    ):
        (tmp_path / name).write_bytes(content)
        assert list(wandb.history(tmp_path / name)) == []


def test_several_loggers_from_python() -> None:
    assert spell({"logger": ["csv", "mlflow"], "logger.mlflow.uri": "http://a"})[0][0] == "logger=[csv,mlflow]"
