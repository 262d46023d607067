"""What is allowed and probably a mistake is said in one line with its numbers, and its fix is accepted."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from dtrain.checks.validate import validate
from dtrain.checks.warnings import of_loss, warnings
from dtrain.cli import main
from dtrain.config.files import RECIPES
from dtrain.launch import recipes
from dtrain.plan.run_prediction import plan_of, slow_cpu
from tests.config.test_files import compose


@pytest.fixture(autouse=True)
def on_two_cores(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("dtrain.config.hardware.count_gpus", lambda: 0)
    monkeypatch.setattr("dtrain.checks.warnings.count_gpus", lambda: 0)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1})


def fixed(line: str) -> str:
    return line.partition("; fix: ")[2]


def test_a_warm_up_longer_than_the_run() -> None:
    overrides = ["cluster.processes=2", "train.steps=100"]
    (line,) = warnings(compose(*overrides, "schedule.warmup_steps=499"))
    assert "\n" not in line and "schedule.warmup_steps=499" in line and "train.steps=100" in line and " 20% " in line
    assert not list(warnings(compose(*overrides, fixed(line))))
    assert not list(warnings(compose(*overrides, "schedule.warmup_steps=100")))


@pytest.mark.parametrize(("micro", "words"), [(6, "predicted not to fit, 8"), (7, "strategy=fsdp: needs"), (3, "")])
def test_what_is_above_the_memory_of_a_gpu_is_not_called_tight(
    micro: int, words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    given = "model=llama-7b hardware=h100 cluster.processes=8 strategy=fsdp activation_checkpointing=ops precision=bf16"
    batch = [f"train.micro_batch_size={micro}", f"train.global_batch_size={8 * micro}", "dry_run=true"]
    assert main(["launch", *given.split(), *batch]) == 2 * (micro == 7)
    error = capsys.readouterr().err
    assert words in error and "tight" not in error, error


def test_a_loss_whose_arguments_are_named_the_other_way_round(tmp_path: Path) -> None:
    (tmp_path / "losses_of_keras.py").write_text(
        "class Loss:\n    def forward(self, labels, logits): ...\n\n\ndef keras(y_true, y_pred): ...\n\n\n"
        "def ours(y_pred, y_true): ...\n\n\ndef short(a, b): ...\n"
    )
    for name, line in (("keras", 5), ("Loss", 2)):
        (text,) = of_loss({"loss": {"_target_": f"losses_of_keras.{name}"}})
        assert f"losses_of_keras.py:{line}: " in text and "gets the outputs first" in text
    assert "def keras(y_pred, y_true)" in next(of_loss({"loss": {"_target_": "losses_of_keras.keras"}}))
    for name in ("ours", "short"):
        assert not list(of_loss({"loss": {"_target_": f"losses_of_keras.{name}"}}))
    assert not list(of_loss({"loss": {"_target_": "torch.nn.MSELoss"}}))
    assert not list(of_loss({"script": {"program": "train.py"}})), "a script has no loss of dtrain"


def test_hours_on_a_cpu() -> None:
    """The planner has no rates of this CPU, so the model's FLOPs at a stated rate."""

    def slow(*overrides: str) -> list[str]:
        config = compose("cluster.processes=2", *overrides)
        return list(slow_cpu(config, plan_of(config)))

    (line,) = slow("model=gpt2-124m")
    assert "a step of 28.2 TFLOP takes about 3m 55s on 2 cores" in line and "300 steps 19h 34m" in line
    assert fixed(line) == "recipe=cpu-tiny, or model=gpt2-tiny"
    assert not slow("model=gpt2-tiny") and not slow("model=gpt2-124m", "train.steps=2")
    assert not slow("model=gpt2-124m", "cluster=slurm")


@pytest.mark.parametrize(
    ("words", "fix"),
    [
        ("recipe=cpu-tiny model.seq_len=20000", "leave out model.seq_len=20000"),
        ("recipe=cpu-tiny model=gpt2-124m train.micro_batch_size=2", "model=gpt2-tiny"),
        ("model.seq_len=20000", "recipe=cpu-tiny"),
    ],
)
def test_a_fix_that_is_typed_already_is_not_repeated(
    words: str, fix: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert main(["launch", *words.split(), "cluster.processes=2", "dry_run=true"]) == 0
    assert f"; fix: {fix}\n" in capsys.readouterr().err


def test_a_first_try_of_a_few_steps_keeps_the_default_without_a_word() -> None:
    config = compose("cluster.processes=2", "train.steps=5")
    assert config["schedule"]["warmup_steps"] == 20 and not list(warnings(config))


def test_many_more_processes_than_cores() -> None:
    overrides = ["train.global_batch_size=200", "cluster.processes=200"]
    (line,) = warnings(compose(*overrides))
    assert "\n" not in line and "cluster.processes=200 on a machine with 2 cores: 100 share a core" in line
    assert fixed(line) == "cluster.processes=2"
    assert not list(warnings(compose(*overrides[:1], fixed(line))))


def test_the_number_of_processes_that_is_named_suits_the_other_settings() -> None:
    overrides = ["strategy=tensor", "strategy.tp=4", "train.global_batch_size=32"]
    (line,) = warnings(compose(*overrides, "cluster.processes=32"))
    assert fixed(line) == "cluster.processes=4"
    validate(compose(*overrides, fixed(line)))


def test_several_ranks_on_a_small_machine_are_usual() -> None:
    config = compose("cluster.processes=2")
    for ranks in (1, 2, 4, 8, 16):
        assert not list(warnings(config | {"cluster": config["cluster"] | {"processes": ranks}}))


def test_ranks_of_a_cluster_have_their_own_cores() -> None:
    config = compose("cluster=slurm", "cluster.nodes=2", "cluster.processes=64", "train.global_batch_size=128")
    assert not list(warnings(config))


def test_no_recipe_warns() -> None:
    recipes.store_recipes()
    for path in RECIPES.glob("*.yaml"):
        if "\nscript:" not in path.read_text():
            assert not list(warnings(compose(f"recipe={path.stem}"))), path.stem


def test_a_machine_that_does_not_tell_its_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    """Macs have no os.sched_getaffinity."""
    monkeypatch.delattr(os, "sched_getaffinity")
    monkeypatch.setattr(os, "cpu_count", lambda: 2)
    config = compose("cluster.processes=2", "model=gpt2-124m")
    (hours,) = slow_cpu(config, plan_of(config))
    (crowd,) = warnings(compose("train.global_batch_size=200", "cluster.processes=200"))
    assert "on 2 cores" in hours and "with 2 cores" in crowd


def test_a_program_of_your_own_has_no_loss_to_warn_of(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "train.py").write_text("")
    assert main(["launch", "script=train.py", "cluster.processes=2", "dry_run=true"]) == 0, capsys.readouterr().err
