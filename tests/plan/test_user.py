"""What a person meets who types a plan, then its launch line: the same ranks, notes that say what was assumed."""

from typing import Any

import pytest

from dtrain.arguments import prepare_arguments
from dtrain.cli import main
from dtrain.config import ranks_per_node
from dtrain.plan.command import launch_command
from dtrain.plan.layout import layout_of
from dtrain.plan.predict import task_of
from dtrain.plan.search import search
from tests.plan.questions import question
from tests.test_config import compose


def said(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    assert main(["plan", *words]) == 0
    return capsys.readouterr().out


def launched(command: str) -> dict[str, Any]:
    """What the launcher composes from a printed line."""
    words = command.removeprefix("python launch.py ").split()
    config = compose(*prepare_arguments(words))
    return {**config, "cluster": {**config["cluster"], "processes": ranks_per_node(config["cluster"])}}


@pytest.mark.parametrize(
    "words",
    [
        ("model=gpt2-1.5b", "hardware=h100", "cluster.nodes=1"),
        ("model=gpt2-1.5b", "hardware=h100", "cluster.processes=4"),
        ("model=gpt2-1.5b", "hardware=dgx-2", "cluster.nodes=2", "train.global_batch_size=64"),
        ("model=gpt2-1.5b", "hardware=dgx-2", "cluster.nodes=2", "cluster=slurm", "train.global_batch_size=64"),
        ("model=gpt2-124m", "hardware=l4", "cluster.nodes=2"),
        ("recipe=gpt2-124m-single-gpu", "hardware=h100"),
    ],
    ids=" ".join,
)
def test_the_printed_line_launches_the_layout_that_was_planned(
    words: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dtrain.config.count_gpus", lambda: 0)  # a laptop
    asked = question(*words)
    best = search(asked.config, asked.typed, task_of(asked.config))[0]
    assert layout_of(launched(launch_command(asked, best))) == best.layout


@pytest.mark.parametrize(("hardware", "gpus", "note"), [("dgx-2", 32, "16 GPUs, by"), ("l4", 16, "with 8 GPUs")])
def test_a_node_has_as_many_gpus_with_a_cluster_as_without(hardware: str, gpus: int, note: str) -> None:
    words = ("model=gpt2-124m", f"hardware={hardware}", "cluster.nodes=2")
    for asked in (question(*words), question(*words, "cluster=slurm")):
        cluster = asked.config["cluster"]
        assert cluster["nodes"] * cluster["processes"] == gpus
        assert any(note in line for line in asked.notes)
    typed = question(*words, "cluster=slurm", "cluster.gpus_per_node=4")
    assert typed.config["cluster"]["processes"] == 4 and not any("GPUs" in line for line in typed.notes)


def test_bf16_is_refused_on_gpus_that_have_none(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "model=gpt2-124m", "hardware=v100", "precision=bf16"]) == 2
    told = capsys.readouterr().err
    assert "precision=bf16" in told and "fix: precision=fp16" in told
