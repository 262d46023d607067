"""What a person meets who types a plan, then its launch line: the same ranks, notes that say what was assumed."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from dtrain.cli import main
from dtrain.commands.plan.request import launch_command
from dtrain.config.hardware import ranks_per_node
from dtrain.launch import auto
from dtrain.launch.arguments import prepare_arguments
from dtrain.plan.layout import layout_of
from dtrain.plan.predict import task_of
from dtrain.plan.search.search import search
from tests.commands.plan.capacity import question
from tests.config.test_files import compose
from tests.plan.test_predict import made


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
    monkeypatch.setattr("dtrain.config.hardware.count_gpus", lambda: 0)  # a laptop
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


# ---- questions -----------------------------------------------------------------------------------------------


def test_how_many_gpus_comes_with_its_launch_line(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dtrain.config.hardware.count_gpus", lambda: 0)
    words = ["model=gpt2-1.5b", "hardware=h100", "train.global_batch_size=512", "--tokens", "30B", "--json"]
    for limit in ("60d", "7d", "12h"):
        found = json.loads(said(capsys, *words, "--gpus-for", limit))
        config = launched(found["command"])
        assert layout_of(config).world_size == found["answer"] == found["rows"][-1]["gpus"]
    assert config["choices"]["cluster"] == "slurm" and config["cluster"]["nodes"] > 1
    assert said(capsys, "model=gpt2-124m", "hardware=h100", "--gpus-for", "30d").startswith("1 GPU finishes in ")


def test_a_number_of_ranks_is_what_gpus_for_looks_for(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["model=gpt2-124m", "hardware=h100", "train.global_batch_size=96", "--gpus-for", "8s"]
    out = said(capsys, *words, "cluster.processes=6")
    assert "note    cluster.processes=6 is taken as the GPUs of a node: --gpus-for tries parts of a node, then" in out
    assert re.search(r"^6 +1 ", out, re.MULTILINE) and re.search(r"^12 +2 ", out, re.MULTILINE)
    assert "note    cluster.nodes=2 is not used: --gpus-for finds" in said(capsys, *words, "cluster.nodes=2")
    assert "taken as" not in (out := said(capsys, *words)) and "not used" not in out


def test_the_row_of_the_answer_is_marked_on_a_terminal(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    out = said(capsys, "model=gpt2-124m", "hardware=h100", "train.global_batch_size=96", "--gpus-for", "20s")
    (marked,) = [line for line in out.splitlines() if "\x1b[1;32m" in line]
    gpus = out.partition("finish in")[0].split()[-2]
    assert gpus == "4" and marked.startswith("\x1b[1;32m4 ")


def test_a_cost_looks_alike_everywhere(capsys: pytest.CaptureFixture[str]) -> None:
    words = [
        "model=gpt2-1.5b",
        "hardware=h100",
        "hardware.price_per_gpu_hour=2.5",
        "cluster.processes=1",
        "--tokens",
        "2B",
    ]
    out = said(capsys, *words, "--explain")
    (cost,) = re.findall(r"^run .*, cost (\S+) to ", out, re.MULTILINE)
    assert f" {cost} = " in out and re.search(rf" {cost}$", out, re.MULTILINE), "in the arithmetic, and in the table"
    assert said(capsys, *words, "--gpus-for", "30d").count(f" {cost}") == 2


def test_a_default_that_was_planned_for_is_named(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    out = said(capsys, "model=gpt2-124m", "cluster=aws-ib")
    assert "note    planned for 1 node, the default; to change it: cluster.nodes=…" in out
    assert "planned for 1 node" not in said(capsys, "model=gpt2-124m", "cluster=aws-ib", "cluster.nodes=1")
    (tmp_path / "hardware").mkdir()
    values = "{gpu_memory_gib: 16, usable_memory_gib: 16, gpu: null}"  # a CPU
    (tmp_path / "hardware" / "mine.yaml").write_text(
        f"defaults: [unknown, _self_]\n{values[1:-1].replace(', ', chr(10))}\n"
    )
    words = ["model=gpt2-tiny", "hardware=mine", "--config-dir", str(tmp_path)]
    out = said(capsys, *words)
    assert "note    planned for 2 ranks, the launcher's default here; to change it: cluster.processes=…" in out
    assert "note    planned for precision=fp32, the default; to change it: precision=bf16" in out
    assert "note    the run is train.steps=300 long, the default; for another length: --tokens 300B" in out
    given = ["precision=fp32", "cluster.processes=2"]
    out = said(capsys, *words, *given, "train.steps=300")
    assert "planned for" not in out and "the run is" not in out
    out = said(capsys, *words, *given, "--tokens", "3", "M")
    assert "the run is" not in out and "= 3M tokens" in out


def test_what_is_planned_for_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    out = said(capsys, "model=gpt2-124m", "hardware=h100", "--gpus-for", "30d")
    assert "note    the run: batch 32 × 1024 tokens, 300 steps = 9.83M tokens, by train.steps" in out
    assert "hardware.price_per_gpu_hour=2.5" in out
    priced = said(capsys, "model=gpt2-124m", "hardware=l4", "hardware.price_per_gpu_hour=2")
    assert "price of a GPU-hour" not in priced
    out = said(capsys, "model=gpt2-124m", "hardware=l4")
    assert "planned for 1 GPU, as hardware=l4 describes one card" in out and "price of a GPU-hour" in out
    assert "planned for" not in said(capsys, "model=gpt2-124m", "hardware=l4", "cluster.processes=1")
    assert "on one GPU it needs" in said(capsys, "model=llama-8b", "hardware=h100", "cluster.processes=1")
    assert main(["plan", "model=gpt2-124m", "hardware=h100", "--tokens", "300"]) == 2
    assert "--tokens=300: is less than one step, which takes 32,768 tokens" in capsys.readouterr().err


def test_a_batch_that_does_not_divide_is_not_a_lack_of_memory(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["model=gpt2-124m", "hardware=h100", "strategy=fsdp", "train.global_batch_size=33", "--tokens", "100B"]
    out = said(capsys, *words, "--gpus-for", "1h")
    assert "nothing fits" not in out and "no layout can divide a batch of 33" in out
    assert "more GPUs cannot share train.global_batch_size=33" in out


def test_pictures_are_counted_as_samples(capsys: pytest.CaptureFixture[str]) -> None:
    for flag in ("--largest-model", "--largest-micro-batch"):
        out = said(capsys, "model=resnet50", "hardware=h100", flag)
        assert "samples/s" in out and "tok/s" not in out
    out = said(capsys, "model=bert-base", "hardware=l4", "--largest-model")
    assert "tok/s" in out and "tokens a sample" in out, "bert-tiny has shorter ones"
    assert "tokens a sample" not in said(capsys, "model=resnet50", "hardware=h100", "--largest-model")


# ---- mistakes and remarks ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (("hardware=h100", "--bogus"), "use one of --json"),
        (("hardware=h100", "--gpu-for", "3d"), "did you mean --gpus-for?"),
        (("hardware=h100", "--gpus-for", "2weeks"), "fix: --gpus-for 2w"),
        (("hardware=h100", "--gpus-for", "14"), "fix: --gpus-for 14d"),
        (("hardware=h100", "--gpus-for", "soon"), "fix: --gpus-for 3d"),
        (("hardware=H100",), "did you mean hardware=h100? "),
        (("hardware=h100", "precision=BF16"), "did you mean precision=bf16? "),
        (("hardware=h100", "--gpus", "4"), "fix: cluster.processes=4 "),
        (("--hardware", "h100"), "--hardware: settings have no dashes\n  fix: hardware=h100"),
        (
            ("hardware=h100", "--price", "2.5"),
            "--price: there is no such setting\n  fix: hardware.price_per_gpu_hour=2.5 ",
        ),
        (("hardware=h100", "--price-per-gpu-hour=2.5"), "fix: hardware.price_per_gpu_hour=2.5 "),
        (("hardware=h100", "hardware.price=2.5"), "fix: hardware.price_per_gpu_hour=2.5 "),
        (("hardware=h100", "-m", "train.steps=1,2"), "dtrain plan takes no sweep"),
        (("hardware=h100", "--json", "--explain"), "combined with --json"),
        (("hardware=unknown",), "hardware=unknown: nothing is known about the GPUs"),
        (
            ("hardware=selene", "cluster.nodes=64", "strategy=3d", "strategy.tp=8", "strategy.pp=2", "strategy.dp=31"),
            "fix: strategy.dp=-1, or cluster.nodes=62",
        ),
    ],
)
def test_mistakes(words: tuple[str, ...], told: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "model=llama-7b", *words]) == 2
    assert told in capsys.readouterr().err


def test_one_layout_is_told_of_a_better_micro_batch(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["model=gpt2-124m", "hardware=h100", "strategy=3d", "strategy.tp=2", "strategy.pp=2"]
    words.append("train.global_batch_size=256")
    assert re.search(r"^note    train.micro_batch_size=\d+ would be \d+% faster$", said(capsys, *words), re.MULTILINE)
    assert "% faster" not in said(capsys, *words, "train.micro_batch_size=1"), "what is typed is meant"


def test_16_bits_that_bring_nothing_are_not_praised(capsys: pytest.CaptureFixture[str]) -> None:
    small = said(capsys, "model=gpt2-tiny", "hardware=h100", "strategy=ddp", "precision=fp32")
    assert "times as fast" not in small
    assert "precision=fp16 would be" in said(capsys, "model=gpt2-124m", "hardware=v100", "precision=fp32")


def test_auto_says_which_memory_lacks(monkeypatch: pytest.MonkeyPatch) -> None:
    lean = made(1.0, strategy="fsdp", offload="cpu", hardware={"host_memory_gib": 1e-6})
    monkeypatch.setattr(auto, "search", lambda *_, **__: [lean])
    with pytest.raises(ValueError, match=r"the smallest, fsdp, lacks .* of host memory"):
        auto.choose(compose("model=gpt2-124m", "hardware=h100"), set())
