"""`dtrain plan`: the lines that people and scripts type, what they print, and what is refused with a way out."""

import gc
import json
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from dtrain.cli import main
from dtrain.commands.plan import command, request
from dtrain.commands.plan.capacity import at_size, cluster_sizes, most_samples, scaled_model
from dtrain.config.files import options_of
from dtrain.config.hardware import count_gpus
from dtrain.launch.compose import plain_config
from dtrain.plan.model_shape import shape_of
from dtrain.plan.parameters import num_parameters
from dtrain.plan.predict import task_of
from dtrain.plan.search.search import search
from dtrain.plan.sections import model_section
from tests.commands.plan.capacity import question
from tests.config.test_files import compose
from tests.plan.test_predict import made

PAPER = (  # GPT-3's layers on 128 GPUs, as published rows are asked for
    "model=gpt2-1.5b", "hardware=h100", "cluster=slurm", "cluster.nodes=16", "strategy=3d", "strategy.tp=8",
    "strategy.pp=4", "model.num_layers=96", "model.dim=12288", "model.num_heads=96", "model.vocab_size=51200",
    "model.seq_len=2048", "train.global_batch_size=1536", "train.micro_batch_size=1", "activation_checkpointing=full",
)  # fmt: skip
SEVEN_B = ("model=llama-7b", "hardware=h100", "train.global_batch_size=64")


@pytest.fixture(autouse=True)
def without_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")


def planned(capsys: pytest.CaptureFixture[str], *words: str) -> Any:
    """What --json prints."""
    assert main(["plan", *words, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def refused(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    assert main(["plan", *words]) == 2
    captured = capsys.readouterr()
    assert not captured.out and "  fix: " in captured.err
    return captured.err


# ---- one layout ----------------------------------------------------------------------------------------------


def test_a_strategy_with_its_degrees_is_that_one_layout(capsys: pytest.CaptureFixture[str]) -> None:
    (row,) = planned(capsys, *PAPER)
    assert (row["strategy"], row["tp"], row["pp"], row["dp"]) == ("3d", 8, 4, 4)
    assert row["micro_batch_size"] == 1 and row["activation_checkpointing"] == "full" and row["precision"] == "bf16"
    parts = {k: v for k, v in row["memory_gib"].items() if k not in ("total", "reserve", "limit")}
    assert sum(parts.values()) == pytest.approx(row["memory_gib"]["total"])
    assert sum(v for k, v in row["step_s"].items() if k != "total") == pytest.approx(row["step_s"]["total"])
    assert row["tokens_per_s"] == pytest.approx(1536 * 2048 / row["step_s"]["total"])
    assert row["gpu_hours"] == pytest.approx(128 * row["step_s"]["total"] * 300 / 3600)


def test_data_parallel_with_its_batch_is_one_layout_and_without_it_several(capsys: pytest.CaptureFixture[str]) -> None:
    words = ("model=gpt2-1.5b", "hardware=a100-80gb", "cluster.nodes=2", "strategy=fsdp")
    (row,) = planned(capsys, *words, "train.micro_batch_size=1")
    assert (row["dp"], row["micro_batch_size"], row["micro_batches"], row["data"]) == (16, 1, 2, "fsdp")
    rows = planned(capsys, *words)
    assert len(rows) > 1 and {row["strategy"] for row in rows} == {"fsdp"}
    assert all(row["world_size"] == 16 for row in rows)


def test_fewer_micro_batches_than_ranks_in_a_row_are_planned_with_gpipe(capsys: pytest.CaptureFixture[str]) -> None:
    words = ("model=gpt2-350m", "hardware=a100-80gb", "strategy=3d", "strategy.tp=2", "strategy.pp=4")
    words = (*words, "train.global_batch_size=8", "train.micro_batch_size=4")
    (row,) = planned(capsys, *words)
    assert (row["schedule"], row["micro_batches"]) == ("gpipe", 2) and "strategy.schedule=gpipe" in row["command"]
    assert "needs at least as many micro-batches" in refused(capsys, *words, "strategy.schedule=1f1b")


@pytest.mark.parametrize(
    ("words", "world"),
    [
        (("hardware=a100-80gb", "cluster.nodes=3", "train.global_batch_size=48"), 24),
        (("hardware=a100-80gb", "cluster.gpus_per_node=4", "cluster.nodes=2"), 8),
        (("hardware=a100-80gb", "cluster.processes=1"), 1),
        (("hardware=h200", "cluster=slurm", "cluster.nodes=2", "cluster.processes=2"), 4),
        (("hardware=v100",), 8),
        (("cluster=aws-efa", "cluster.nodes=2"), 16),
    ],
)
def test_gpus_are_nodes_times_what_a_node_has(
    words: tuple[str, ...], world: int, capsys: pytest.CaptureFixture[str]
) -> None:
    (row,) = planned(capsys, "model=gpt2-350m", "strategy=ddp", "train.micro_batch_size=1", *words)
    assert row["world_size"] == row["dp"] == world


def test_this_machines_gpus_are_planned_for_where_nothing_is_said(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dtrain.config.hardware.detect", lambda: "h200")
    monkeypatch.setattr("dtrain.config.hardware.count_gpus", lambda: 2)
    words = ("model=gpt2-350m", "strategy=ddp", "train.micro_batch_size=1")
    (row,) = planned(capsys, *words, "hardware.price_per_gpu_hour=3.5")
    assert row["world_size"] == 2 and row["memory_gib"]["limit"] > 130
    assert row["cost"] == pytest.approx(3.5 * row["gpu_hours"])


def test_16_bits_are_taken_on_gpus_unless_something_else_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    words = ("model=gpt2-350m", "strategy=ddp", "train.micro_batch_size=1")
    (a100,) = planned(capsys, *words, "hardware=a100-80gb")
    assert a100["precision"] == "bf16" and "precision=bf16" in a100["command"] and a100["notes"]
    (v100,) = planned(capsys, *words, "hardware=v100")
    assert v100["precision"] == "fp16"
    (fp32,) = planned(capsys, *words, "hardware=a100-80gb", "precision=fp32")
    assert fp32["precision"] == "fp32" and fp32["step_s"]["total"] > a100["step_s"]["total"]


@pytest.mark.parametrize(
    ("text", "code", "said"),
    [
        ("", 0, ""),
        ("# nothing yet\n", 0, ""),
        ("5\n", 2, "recipe"),
        ("a: [1\n", 2, "is not valid yaml"),
        ("- a\n", 2, "must be a yaml mapping"),
        ("defaults: 5\n", 2, "defaults"),
        ("defaults:\n  - {}\n  - _self_\ntrain: {steps: 5}\n", 2, "Missing group name"),
    ],
)
def test_a_recipe_of_ones_own_may_be_odd(
    text: str, code: int, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "mine.yaml").write_text(text)
    assert main(["plan", f"recipe={tmp_path}/mine.yaml", "model=gpt2-124m", "hardware=h100"]) == code
    assert said in capsys.readouterr().err


def test_a_recipe_is_planned_as_it_is(capsys: pytest.CaptureFixture[str]) -> None:
    (row,) = planned(capsys, "recipe=gpt2-1.5b-fsdp-4gpu", "hardware=a100-80gb")
    assert (row["strategy"], row["dp"], row["micro_batch_size"], row["compile"]) == ("fsdp", 4, 8, "blocks")
    assert row["command"].endswith("recipe=gpt2-1.5b-fsdp-4gpu hardware=a100-80gb strategy=fsdp")
    (tiny,) = planned(capsys, "recipe=tiny/llama-7b-zero3-8gpu", "hardware=a100-80gb")
    assert tiny["strategy"] == "zero3"
    others = planned(capsys, "recipe=gpt2-1.5b-fsdp-4gpu", "hardware=a100-80gb", "strategy=auto")
    assert {"ddp", "fsdp", "pipeline"} <= {row["strategy"] for row in others}
    assert {row["micro_batch_size"] for row in others} == {8}  # the recipe says so


# ---- a search ------------------------------------------------------------------------------------------------


def test_without_a_strategy_all_are_compared_and_the_best_is_first(capsys: pytest.CaptureFixture[str]) -> None:
    rows = planned(capsys, *SEVEN_B)
    assert {"ddp", "fsdp", "tensor", "pipeline", "3d", "zero3"} <= {row["strategy"] for row in rows}
    assert rows[0]["fits"] and rows == sorted(rows, key=lambda row: not row["fits"])
    fitting = [row["step_s"]["total"] for row in rows if row["fits"]]
    assert fitting[0] <= 1.01 * min(fitting)
    assert planned(capsys, *SEVEN_B, "strategy=auto") == rows


def test_degrees_without_a_strategy_are_kept(capsys: pytest.CaptureFixture[str]) -> None:
    rows = planned(capsys, *SEVEN_B, "strategy.tp=4")
    assert {row["tp"] for row in rows} == {4} and {row["strategy"] for row in rows} == {"tensor", "3d"}


def test_the_table_says_what_is_best_why_and_how_to_start_it(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", *SEVEN_B, "optim.lr=0.001"]) == 0
    out = capsys.readouterr().out
    assert out.startswith("llama-7b, 6.74B parameters · 8 × H100")
    for name in ("fsdp", "ddp", "zero1", "tensor", "pipeline", "3d"):
        assert re.search(rf"^{name} ", out, re.MULTILINE), name
    assert re.search(r"^ddp .* lacks \d", out, re.MULTILINE)
    assert re.search(r"^chosen  \w+.*ddp would need [\d.]+ GiB a GPU", out, re.MULTILINE)
    assert re.search(r"^memory  [\d.]+ GiB = parameters", out, re.MULTILINE)
    assert re.search(r"^step    .* = compute", out, re.MULTILINE)
    launch = re.search(
        r"^launch  .*optim.lr=0.001 cluster.processes=8 strategy=\w+ .*precision=bf16$", out, re.MULTILINE
    )
    assert launch and "layouts: --all" in out


def test_all_and_explain_and_tokens(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["plan", "model=gpt2-124m", "hardware=h100", "strategy=ddp", "--all", "--explain", "--tokens", "10B"]
    assert main(words) == 0
    out = capsys.readouterr().out
    assert "= 10B tokens" in out and "--all shows" not in out
    assert "memory of the fullest GPU" in out and "one step of the slowest GPU" in out and "MFU" in out


def test_what_does_not_fit_is_told_with_what_does(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", *SEVEN_B, "strategy=ddp", "train.micro_batch_size=1"]) == 0
    out = capsys.readouterr().out
    assert re.search(r"It lacks [\d.]+ GiB on each GPU. \w+.* fits: .*strategy=", out)
    assert "\nlaunch  " not in out


def test_without_rates_memory_is_told_and_no_time(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "model=gpt2-350m", "hardware=h100", "hardware.matmul_tflops=null"]) == 0
    out = capsys.readouterr().out
    assert "no time is predicted" in out and "chosen  ddp: " in out and "\nstep " not in out


def test_fp32_is_told_what_16_bits_would_bring(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "model=gpt2-350m", "hardware=a100-80gb", "precision=fp32"]) == 0
    assert re.search(r"precision=bf16 would be [\d.]+ times as fast", capsys.readouterr().out)


def test_the_command_is_the_launchers_own_words() -> None:
    asked = question(*SEVEN_B, "strategy.tp=2", "strategy=tensor")
    text = request.launch_command(asked, made(strategy="tensor", tp=2, dp=4, micro_batch_size=2))
    assert text.endswith(
        "model=llama-7b hardware=h100 train.global_batch_size=64 cluster.processes=8 strategy=tensor strategy.tp=2 "
        "train.micro_batch_size=2 precision=bf16 train.steps=100"
    )
    bucket = question(*SEVEN_B, "strategy=ddp", "strategy.bucket_mb=50")
    assert request.launch_command(bucket, made(strategy="ddp", data="ddp")).endswith("strategy.bucket_mb=50")
    assert "bucket_mb" not in request.launch_command(bucket, made())


@pytest.mark.parametrize("kind", ["ring", "allgather", "ulysses"])
def test_the_launcher_accepts_how_sequences_are_divided(
    kind: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    words = ["model=llama-8b", "hardware=h100", "train.global_batch_size=16", "model.seq_len=65536", "data=synthetic"]
    rows = planned(capsys, *words, "strategy=fsdp", "strategy.cp=4", f"strategy.cp_kind={kind}")
    modes = {row["activation_checkpointing"] for row in rows}
    assert ("ops" in modes) == (kind == "ulysses")
    _, program, *found = shlex.split(rows[0]["command"])
    assert "strategy.cp=4" in found
    assert main(["launch", *found, "dry_run=true", f"run_dir={tmp_path / 'run'}"]) == 0, program


def test_what_a_plan_imports() -> None:
    """Under a second: no torch, nothing for a screen, and none of what only a launch needs."""
    heavy = {
        "torch", "numpy", "rich", "submitit", "deepspeed", "ctypes.util", "dtrain.runs.find",
        "dtrain.launch.sweeps", "dtrain.ui.tables", "dtrain.checks.init_from", "dtrain.preflight.network_env",
        "dtrain.launch.app",
        "dtrain.plan.search.nearest_fit",
    }  # fmt: skip
    code = (
        "import sys; from dtrain.cli import main; "
        "code = main(['plan', 'model=llama-7b', 'cluster=aws-ib', 'cluster.nodes=4']); "
        f"sys.exit(code or ' '.join(sorted({heavy!r} & set(sys.modules))) or 0)"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (found.returncode, found.stderr) == (0, "")


@pytest.mark.parametrize("words", [["model=llama-7b", "cluster=aws-ib"], ["model=resnet50", "optim.lr=1e-3"]])
def test_it_composes_what_the_launcher_does(words: list[str]) -> None:
    here, there = plain_config(words), compose(*words)
    skipped = ("run_dir", "cluster")  # the time; and how many processes are here
    assert {k: v for k, v in here.items() if k not in skipped} == {k: v for k, v in there.items() if k not in skipped}


def test_collecting_is_as_before_after_a_plan(capsys: pytest.CaptureFixture[str]) -> None:
    before = gc.get_threshold()
    assert main(["plan", "--help"]) == 0 and main(["plan", "--no-such"]) == 2
    assert gc.get_threshold() == before


def test_the_command_says_what_a_plain_cluster_does_not_know(capsys: pytest.CaptureFixture[str]) -> None:
    (row,) = planned(capsys, "hardware=dgx-2", "cluster.nodes=2", "strategy=ddp", "train.micro_batch_size=1")
    assert row["world_size"] == 32 and "cluster=slurm cluster.gpus_per_node=16 " in row["command"]


def test_a_package_that_is_missing_here_is_named(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    (note,) = command.package_note(made(strategy="zero2", data="zero2"))
    assert "needs deepspeed" in note and "pip install 'dtrain[deepspeed]'" in note
    assert command.package_note(made()) == []


def test_another_programs_step_is_timed_by_its_stack(capsys: pytest.CaptureFixture[str]) -> None:
    (ours,), (theirs,) = planned(capsys, *PAPER), planned(capsys, *PAPER, "--stack", "megatron-2021")
    assert ours["memory_gib"] == theirs["memory_gib"] and ours["step_s"] != theirs["step_s"]


def test_a_hardware_file_of_ones_own(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (tmp_path / "hardware").mkdir()
    text = "defaults: [h100, _self_]\ngpus_per_node: 4\nprice_per_gpu_hour: 2.5\n"
    (tmp_path / "hardware" / "mine.yaml").write_text(text)
    rows = planned(capsys, "model=gpt2-350m", "hardware=mine", "strategy=ddp", "--config-dir", str(tmp_path))
    assert rows[0]["dp"] == 4 and rows[0]["cost"] == pytest.approx(2.5 * rows[0]["gpu_hours"])
    assert f"--config-dir {tmp_path} " in rows[0]["command"]
    assert "there is no such folder" in refused(capsys, "hardware=mine", "--config-dir", str(tmp_path / "none"))


# ---- what is refused -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("model=llama-7b", "hardware=h100", "--jsn"), "did you mean --json?"),
        (("model=llama-7b", "hardware=h100", "--frobnicate"), "use one of --json"),
        (("model=llama-7b", "hardware=h100", "train.stepz=5"), "did you mean train.steps"),
        (("model=llama-7b", "hardware=h1000"), "did you mean hardware=h100?"),
        (("model=llama-7b", "cluster.nodes=4"), "hardware=NAME, where NAME can be a100-40gb"),
        (("model=llama-7b",), "there is no GPU here to plan for"),
        (("model=my.own.Net", "hardware=h100"), "its sizes are not known without building it"),
        (("model=gpt2-1.5b", "hardware=h100", "strategy=tensor", "strategy.tp=8"), "must divide model.num_heads=25"),
        (("model=llama-7b", "hardware=h100", "model.dim=4097"), "must be a multiple of model.num_heads"),
        (("hardware=h100", "train.global_batch_size=9", "strategy=ddp"), "a multiple of the 8 data-parallel ranks"),
        (
            ("hardware=h100", "train.global_batch_size=9", "strategy=ddp", "train.micro_batch_size=1"),
            "must be a multiple of the 8 data-parallel ranks",
        ),
        (("hardware=h100", "train.global_batch_size=7", "strategy.tp=1", "strategy.pp=1"), "8 data-parallel ranks"),
        (("model=llama-7b", "hardware=h100", "cluster.processes=16"), "a node has 8 GPUs"),
        (("model=llama-7b", "hardware=h100", "cluster=local", "cluster.nodes=2"), "is one machine"),
        (("model=llama-7b", "hardware=h100", "strategy=zero1", "strategy.offload=nvme"), "zero1"),
        (("model=llama-7b", "hardware=h100", "--tokens", "many"), "--tokens 300B"),
        (("model=llama-7b", "hardware=h100", "--gpus-for=soon"), "--gpus-for 3d"),
        (("model=llama-7b", "hardware=h100", "--gpus-for"), "--gpus-for 3d"),
        (("model=llama-7b", "hardware=h100", "--stack", "x"), "--stack can be eager, "),
        (("model=llama-7b", "hardware=h100", "--largest-model", "--gpus-for", "3d"), "cannot be combined with"),
        (("recipe=no-such", "hardware=h100"), "recipe"),
        (("fsdp", "hardware=h100"), "strategy=fsdp"),
    ],
)  # fmt: skip
def test_mistakes_are_told_with_a_fix(words: tuple[str, ...], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    if said == "there is no GPU here to plan for" and count_gpus():
        pytest.skip("there is a GPU here")
    assert said in refused(capsys, *words)


def test_settings_that_leave_no_layout_are_told_with_a_batch_that_does() -> None:
    config = question(*SEVEN_B).config
    config["train"]["global_batch_size"] = 13
    error = str(command.none_possible(config))
    assert "no layout of 8 GPUs" in error and error.endswith("  fix: train.global_batch_size=16")


def test_help_lists_every_option(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--help"]) == 0
    out = capsys.readouterr().out
    assert all(option in out for option in (*command.FLAGS, *command.VALUES, "calibrate"))


def test_calibrate_is_another_command(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[list[str]] = []
    monkeypatch.setattr("dtrain.plan.calibrate.command.main", lambda argv: seen.append(argv) or 7)
    assert command.main(["calibrate", "--out", "x.yaml"]) == 7
    assert seen == [["--out", "x.yaml"]]


def test_a_unit_may_be_a_word() -> None:
    assert command.read_options(["--tokens", "300", "billion"]).tokens == 3e11


@pytest.mark.parametrize(
    ("text", "value"), [("300B", 3e11), ("1.5T", 1.5e12), ("26e6", 26e6), ("1000", 1e3), ("2k", 2e3), ("1_000", 1e3)]
)
def test_tokens_as_people_write_them(text: str, value: float) -> None:
    assert command.read_options(["--tokens", text]).tokens == pytest.approx(value)


@pytest.mark.parametrize(("text", "value"), [("3d", 259200), ("12h", 43200), ("1d12h", 129600), ("1.5h", 5400)])
def test_times_as_people_write_them(text: str, value: float) -> None:
    assert command.read_options([f"--gpus-for={text}"]).gpus_for == pytest.approx(value)


# ---- questions -----------------------------------------------------------------------------------------------


def test_how_many_gpus(capsys: pytest.CaptureFixture[str]) -> None:
    words = ("model=gpt2-350m", "hardware=a100-80gb", "train.global_batch_size=256", "--tokens", "10B")
    answer = planned(capsys, *words, "--gpus-for", "12h")
    gpus = answer["answer"]
    last = answer["rows"][-1]
    assert last["gpus"] == gpus and last["run_s"] <= 43200 < answer["rows"][-2]["run_s"]
    more = planned(capsys, *words, "--gpus-for", "3h")["answer"]
    assert more is None or more > gpus
    assert main(["plan", *words, "--gpus-for", "12h"]) == 0
    assert capsys.readouterr().out.startswith(f"{gpus} GPUs finish in ")


def test_more_gpus_than_the_batch_can_use_are_not_the_answer(capsys: pytest.CaptureFixture[str]) -> None:
    words = ("model=gpt2-tiny", "hardware=h100", "train.global_batch_size=4", "--tokens", "100B", "--gpus-for", "1h")
    answer = planned(capsys, *words)
    assert answer["answer"] is None and "train.global_batch_size=4" in answer["sentence"]
    assert len(answer["rows"]) < 20


def test_the_largest_model(capsys: pytest.CaptureFixture[str]) -> None:
    words = ("model=llama-1b", "hardware=a100-40gb", "cluster.processes=2", "train.global_batch_size=2")
    answer = planned(capsys, *words, "--largest-model")
    rows = {row["model"]: row for row in answer["rows"]}
    assert rows["llama-tiny"]["fits"] and not rows["llama-70b"]["fits"]
    assert answer["answer"] == max(row["parameters"] for row in rows.values() if row["fits"])
    sizes = [row["parameters"] for row in answer["rows"]]
    assert sizes == sorted(sizes)


def test_a_scaled_model_is_one_that_the_launcher_takes() -> None:
    config = question(*SEVEN_B).config
    smaller = 0
    for factor in (0.05, 0.3, 1.0, 1.7, 9.0):
        model = scaled_model(config["model"], factor)
        shape = shape_of({**config, "model": model})
        assert model["dim"] % model["num_heads"] == 0 and model["num_heads"] % model["num_kv_heads"] == 0
        assert shape is not None and num_parameters(shape) > smaller
        smaller = num_parameters(shape)
    grouped = scaled_model(question("model=llama-70b", "hardware=h100").config["model"], 0.5)
    assert grouped["num_heads"] // grouped["num_kv_heads"] == 8
    assert scaled_model(config["model"], 1.0) == config["model"]


def test_the_largest_micro_batch(capsys: pytest.CaptureFixture[str]) -> None:
    words = ("model=gpt2-1.5b", "hardware=a100-80gb", "strategy=fsdp", "--largest-micro-batch")
    answer = planned(capsys, *words)
    by_mode = {row["activation_checkpointing"]: row["micro_batch_size"] for row in answer["rows"]}
    assert 0 < by_mode["none"] < by_mode["selective"] < by_mode["full"] == answer["answer"]
    task = task_of(question("model=gpt2-1.5b", "hardware=a100-80gb").config)
    assert task is not None
    layout = made(strategy="fsdp", dp=8).layout
    most = most_samples(layout, task)
    assert at_size(layout, most, task).fits and not at_size(layout, most + 1, task).fits


def test_cluster_sizes_grow_from_one_gpu() -> None:
    sizes = [nodes * ranks for nodes, ranks in cluster_sizes({"cluster": {"processes": 8}})]
    assert sizes[:8] == [1, 2, 4, 8, 16, 24, 32, 48] and sizes == sorted(sizes)


@pytest.mark.parametrize("name", [name for name in options_of("hardware") if name not in ("unknown", "cpu")])
def test_every_hardware_file_can_be_planned_for(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    (row,) = planned(
        capsys, "model=gpt2-350m", f"hardware={name}", "cluster.nodes=2", "strategy=3d", "strategy.tp=1",
        "strategy.pp=2", "train.global_batch_size=128", "train.micro_batch_size=1",
    )  # fmt: skip
    assert row["fits"] and row["step_s"]["total"] > 0 and 0 < row["mfu"] < 1


@pytest.mark.parametrize("name", sorted(set(options_of("model")) - {"hf"}))  # hf: what a folder holds
def test_every_model_can_be_planned_for(name: str) -> None:
    config = question("hardware=h100", "strategy=fsdp", "data=synthetic", "train.global_batch_size=64").config
    found = search({**config, "model": model_section(name), "data": {}}, {"strategy"})
    assert found[0].memory_bytes > 0 and found[0].step_s is not None and found[0].step_s > 0


def test_the_launch_line_trains_the_tokens_that_were_planned(capsys: pytest.CaptureFixture[str]) -> None:
    given = ["model=llama-7b", "hardware=h100", "train.global_batch_size=256", "--tokens", "10B"]
    steps = -(-10 * 10**9 // (256 * 4096))
    for asked in ([], ["--gpus-for", "30d"]):
        assert main(["plan", *given, *asked]) == 0
        launch = capsys.readouterr().out.rpartition("launch  ")[2]
        assert f" train.steps={steps}\n" in launch
    assert main(["plan", *given[:3]]) == 0
    assert "train.steps" not in capsys.readouterr().out.rpartition("launch  ")[2]


def test_numbers_of_gpus_that_cannot_be_enough_are_left_out(capsys: pytest.CaptureFixture[str]) -> None:
    given = ["model=llama-7b", "hardware=h100", "train.global_batch_size=1024", "--tokens", "300B"]
    assert main(["plan", *given, "--gpus-for", "14d", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [row["gpus"] for row in found["rows"]] == [8, 16, 24]


def test_a_slower_row_above_a_faster_one_is_explained(capsys: pytest.CaptureFixture[str]) -> None:
    given = ["model=llama-7b", "cluster=aws-ib", "cluster.nodes=1", "train.global_batch_size=256"]
    assert main(["plan", *given, "hardware.price_per_gpu_hour=2"]) == 0
    text = capsys.readouterr().out
    steps = [p["step_s"]["total"] for p in rows_of(given, capsys) if p["fits"]]
    assert steps != sorted(steps)
    assert (
        "note    the order counts steps of tensor, pipeline, 3d, of which no run of ours has timed a step, as 9% longer"
        in text
    )
    assert re.search(
        r"^run     \S+.* to .*, cost [\d.]+ to [\d.]+ \(published runs took up to 21% longer", text, re.MULTILINE
    )


def rows_of(given: list[str], capsys: pytest.CaptureFixture[str]) -> list[dict[str, Any]]:
    assert main(["plan", *given, "--json"]) == 0
    rows: list[dict[str, Any]] = json.loads(capsys.readouterr().out)
    return rows


def test_the_heading_names_lora_and_the_hosts_memory(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "model=llama-7b", "hardware=h100", "lora.rank=8", "hardware.host_memory_gib=512"]) == 0
    heading = capsys.readouterr().out.splitlines()[0]
    assert "LoRA of rank 8" in heading and "512 GiB of host memory" in heading
