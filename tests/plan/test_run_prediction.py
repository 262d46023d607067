"""Told before, held against after: a prediction beside every run, and no launch that cannot fit."""

import functools
import json
import logging
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dtrain.cli import main
from dtrain.launch.local import Local
from dtrain.plan import fits, run_prediction
from dtrain.plan.layout import layout_of
from dtrain.plan.predict import predict_layout
from dtrain.plan.search import nearest_fit
from dtrain.plan.sections import strategy_section
from dtrain.runs import folder
from dtrain.runs.folder import read_json
from dtrain.runs.record import read_run
from tests import world
from tests.config.test_files import compose
from tests.test_bad_inputs import COMPOSE_ONCE

PLAN: dict[str, Any] = {
    "hardware": "h100", "strategy": "ddp", "fits": True, "memory_gib": {"total": 40.0, "parameters": 10.0,
    "optimizer": 20.0, "activations": 8.0, "fragmentation": 2.0, "reserve": 1.0, "limit": 79.0},
    "step_s": {"total": 0.4, "compute": 0.3, "communication": 0.1}, "tokens_per_s": 81920.0, "mfu": 0.41,
    "wall_s": 4000.0, "unit": "tokens",
}  # fmt: skip
ELSEWHERE = {"cluster": {"_target_": "dtrain.launch.slurm.Slurm"}, "dry_run": True}  # not in this machine's memory
SEVEN_B = ["model=llama-7b", "precision=bf16", "data=synthetic", "cluster=infiniband", "dry_run=true"]


@pytest.fixture(autouse=True)
def started(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """Work in an empty folder, without GPUs; the run folders that were handed to the launcher."""
    folders: list[Path] = []
    monkeypatch.setattr(*COMPOSE_ONCE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setenv("DTRAIN_STRICT", "1")
    monkeypatch.setattr(Local, "launch", lambda self, run_dir: folders.append(run_dir) or 0)
    return folders


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two GPUs of whatever kind in this machine."""
    monkeypatch.setattr("dtrain.config.hardware.count_gpus", lambda: 2)


def with_memory(total: float, fragmentation: float = 2.0) -> dict[str, Any]:
    memory = PLAN["memory_gib"] | {"total": total, "fragmentation": fragmentation}
    memory["activations"] = total - fragmentation - 30.0
    return PLAN | {"memory_gib": memory, "fits": total + memory["reserve"] <= memory["limit"]}


# ---- before the run ------------------------------------------------------------------------------------------


def test_the_line_before_a_run() -> None:
    said = "40.0 GiB of 79.0 GiB a GPU · 400 ms a step · 81.9K tokens/s · MFU 41.0% · 1h 06m of steps"
    assert run_prediction.lines(PLAN) == [f"predicted {said} (hardware=h100, not calibrated)"]
    chosen = PLAN | {"chosen": "ddp, dp 8", "calibrated": True}
    assert run_prediction.lines(chosen) == [
        "auto      ddp, dp 8",
        f"predicted {said} (hardware=h100, calibrated by a measured step)",
    ]
    untimed = PLAN | dict.fromkeys(("step_s", "tokens_per_s", "mfu", "wall_s"))
    assert run_prediction.lines(untimed) == ["predicted 40.0 GiB of 79.0 GiB a GPU (hardware=h100, not calibrated)"]


def test_a_file_that_was_measured_says_so() -> None:
    assert run_prediction.lines(PLAN | {"measured": True})[0].endswith(
        "(hardware=h100, rates measured; no run compared yet)"
    )
    on_cpu = PLAN | {"memory_gib": PLAN["memory_gib"] | {"limit": None}}
    assert run_prediction.lines(on_cpu)[0].startswith("predicted 400 ms a step"), "no memory of a CPU's processes"


def test_gpus_that_are_not_here_are_not_what_a_run_is_held_against(
    started: list[Path], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["launch", "hardware=h100", "train.steps=3", "run_dir=run"]) == 0
    plan = read_json(started[0] / "plan.json")
    assert plan["reason"] == "hardware=h100 has GPUs, and there is no GPU here" and "step_s" not in plan
    said = capsys.readouterr()
    assert said.out == "" and said.err.count("\n") == 1 and "on the CPU" in said.err


@pytest.mark.usefixtures("gpus")
def test_bf16_on_a_v100_is_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    config = compose("hardware=v100", "precision=bf16", "model=gpt2-124m")
    with caplog.at_level(logging.WARNING, "dtrain"):
        fits.check(config, run_prediction.plan_of(config))
    assert caplog.messages == ["V100 has no tensor cores for bf16, which is slow there: precision=fp16"]


def test_nothing_is_said_where_nothing_is_known(started: list[Path], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["launch"]) == 0
    captured = capsys.readouterr()
    assert captured.out == captured.err == ""
    plan = read_json(started[0] / "plan.json")
    assert plan["reason"].startswith("hardware=cpu") and "memory_gib" not in plan


@pytest.mark.usefixtures("gpus")
def test_a_model_of_ones_own_has_no_prediction(started: list[Path], tmp_path: Path) -> None:
    (tmp_path / "my_net_q.py").write_text(
        "from torch import nn\nclass Net(nn.Module):\n    def __init__(self, dim: int = 4):\n        self.dim = dim\n"
        "    def forward(self, x, targets):\n        return x\n"
    )
    words = ["model=my_net_q.Net", "data=digits", "data.image_size=8", "data.channels=1", "hardware=h100"]
    assert main(["launch", *words]) == 0
    assert "sizes are not known" in read_json(started[0] / "plan.json")["reason"]


@pytest.mark.usefixtures("gpus")
def test_the_plan_is_kept_with_the_run(started: list[Path], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["launch", "model=gpt2-124m", "hardware=h100", "train.stop_after=7", "run_dir=run"]) == 0
    plan = read_json(started[0] / "plan.json")
    assert (plan["strategy"], plan["dp"], plan["hardware"], plan["fits"]) == ("ddp", 2, "h100", True)
    assert plan["wall_s"] == pytest.approx(7 * plan["step_s"]["total"])
    [line] = [x for x in capsys.readouterr().out.splitlines() if x.startswith("predicted")]
    assert "a GPU · " in line and "a step" in line
    figures = folder.predicted(started[0])
    assert figures is not None and figures["memory_gib"] == plan["memory_gib"]["total"]
    assert set(figures) == {"tokens_per_s", "step_s", "mfu", "memory_gib"}


def test_a_dry_run_says_it_beside_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["launch", "model=gpt2-124m", "hardware=h100", "--dry-run"]) == 0
    captured = capsys.readouterr()
    assert captured.err.startswith("predicted ") and "predicted" not in captured.out


def test_ranks_that_share_a_gpu_are_not_predicted(monkeypatch: pytest.MonkeyPatch) -> None:
    config = compose("hardware=h100", "cluster.processes=4")
    monkeypatch.setattr("dtrain.config.hardware.count_gpus", lambda: 2)
    assert "share a GPU" in run_prediction.plan_of(config)["reason"]


@pytest.mark.usefixtures("gpus")
def test_this_machine_s_gpus_are_recognised(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dtrain.config.hardware.detect", lambda: "h200")
    plan = run_prediction.plan_of(compose("model=gpt2-124m"))
    assert plan["hardware"] == "h200" and plan["memory_gib"]["limit"] > 130
    assert run_prediction.plan_of(compose("model=gpt2-124m", "hardware=l4"))["hardware"] == "l4", "what is typed wins"
    typed = run_prediction.plan_of(
        compose("model=gpt2-124m", "hardware.gpu_memory_gib=10", "hardware.usable_memory_gib=9.5")
    )
    assert (typed["hardware"], typed["memory_gib"]["limit"], typed["step_s"]) == ("unknown", 9.5, None)
    priced = run_prediction.plan_of(compose("model=gpt2-124m", "hardware.price_per_gpu_hour=2"))
    assert (priced["hardware"], priced["memory_gib"]) == ("h200", plan["memory_gib"]), "a price says nothing of the GPU"
    assert priced["cost"] == pytest.approx(2 * priced["gpu_hours"])
    assert "reason" in run_prediction.plan_of(compose("cluster=slurm")), (
        "this machine says nothing about a cluster's nodes"
    )


@pytest.mark.usefixtures("gpus")
def test_what_is_offloaded_goes_to_this_machine_s_own_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """A file about a GPU can only say what hosts of such GPUs usually have."""
    monkeypatch.setattr("dtrain.config.hardware.detect", lambda: "h200")
    monkeypatch.setattr("os.sysconf", lambda name: {"SC_PHYS_PAGES": 2**20}.get(name, 2**12))
    words = ["model=llama-7b", "data=synthetic", "strategy=fsdp", "strategy.offload=cpu"]
    words += ["precision=bf16", "train.micro_batch_size=1"]
    assert run_prediction.plan_of(compose(*words))["fits"] is False, "112 GB in a machine of 4 GiB"
    assert run_prediction.plan_of(compose(*words, "hardware.host_memory_gib=900"))["fits"] is True, "what is typed wins"
    assert run_prediction.plan_of(compose(*words, "hardware=h200"))["fits"] is True


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_no_figure_of_a_plan_is_anything_but_a_number(
    value: float, started: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    row = {"strategy": "ddp", "fits": True, "memory_gib": {"total": value, "limit": 79.0}, "tokens_per_s": value}
    monkeypatch.setattr(run_prediction, "row_of", lambda config: row)
    assert main(["launch", "hardware=h100", "run_dir=run"]) == 0
    text = (started[0] / "plan.json").read_text()
    assert json.loads(text, parse_constant=pytest.fail)["memory_gib"] == {"total": None, "limit": 79.0}
    (started[0] / "plan.json").write_text(json.dumps(row))
    assert folder.predicted(started[0]) is None, "one from elsewhere may have them"


@pytest.mark.usefixtures("gpus")
def test_a_fault_of_the_planner_does_not_stop_a_launch(
    started: list[Path], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def broken(config: object) -> None:
        raise KeyError("oops")

    monkeypatch.setattr(run_prediction, "predict", broken)
    with pytest.raises(KeyError):  # in tests it is heard
        main(["launch", "hardware=h100"])
    monkeypatch.delenv("DTRAIN_STRICT")
    assert main(["launch", "hardware=h100", "run_dir=run"]) == 0
    assert "oops" in read_json(started[0] / "plan.json")["reason"]
    said = capsys.readouterr().err
    assert said == "the planner failed (KeyError: 'oops'), so there is no prediction for this run\n"


# ---- what cannot fit -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("total", "force", "outcome"),
    [
        (77.9, False, "quiet"), (78.5, False, "warned"), (84.8, False, "warned"), (85.0, False, "refused"),
        (400.0, False, "refused"), (400.0, True, "quiet"), (80.0, True, "quiet"),
    ],
)  # fmt: skip
def test_refused_only_when_it_is_certain(
    total: float, force: bool, outcome: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Between the two it is estimates that decide: activations, the allocator's waste, what the driver takes."""
    monkeypatch.setattr(fits, "way_out", lambda config: "strategy=fsdp (20 GiB)")
    found = "quiet"
    with caplog.at_level(logging.WARNING, "dtrain"):
        try:
            fits.check(ELSEWHERE | {"force": force}, with_memory(total))
        except ValueError as error:
            found = "refused"
            assert f"needs {total:.1f} GiB on each GPU (" in str(error) and "optimizer 20.0 GiB" in str(error)
            assert "hardware=h100 has 79.0 GiB\n  fix: strategy=fsdp (20 GiB); or force=true" in str(error)
    assert (found if not caplog.records else "warned") == outcome


def test_what_is_offloaded_may_not_fit_in_the_host(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(fits, "way_out", lambda config: "strategy=fsdp")
    with caplog.at_level(logging.WARNING, "dtrain"):
        fits.check(ELSEWHERE | {"force": False}, PLAN | {"fits": False})
    assert "may not fit in the memory of hardware=h100's hosts" in caplog.messages[0]


def test_unknown_memory_is_no_reason_to_refuse() -> None:
    config = ELSEWHERE | {"force": False}
    fits.check(config, {"hardware": "unknown", "reason": "…"})
    fits.check(config, PLAN | {"fits": None, "memory_gib": PLAN["memory_gib"] | {"limit": None}})


def test_a_launch_that_cannot_fit_is_refused_and_its_fix_works(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """7 billion parameters are 112 GB of model states under ddp, and an H100 has 80."""
    assert main(["launch", *SEVEN_B]) == 2
    captured = capsys.readouterr()
    assert "strategy=ddp: needs " in captured.err and captured.out == "" and not list(tmp_path.iterdir())
    fix = captured.err.partition("  fix: ")[2].partition(" (")[0].split()
    assert fix[0] == "strategy=fsdp"
    assert main(["launch", *SEVEN_B, *fix]) == 0
    assert "predicted " in capsys.readouterr().err
    assert main(["launch", *SEVEN_B, "force=true"]) == 0


def test_the_fix_of_a_launch_in_the_default_precision_is_in_16_bits(capsys: pytest.CaptureFixture[str]) -> None:
    for hardware, name in (("h100", "bf16"), ("v100", "fp16")):
        words = [word for word in SEVEN_B if not word.startswith("precision")] + [f"hardware={hardware}"]
        assert main(["launch", *words]) == 2
        fix = capsys.readouterr().err.partition("  fix: ")[2].partition(" (")[0].split()
        assert fix[0] == f"precision={name}" and len(fix) > 1
        assert main(["launch", *words, *fix]) == 0
        capsys.readouterr()
    assert main(["launch", *words, "precision=fp32"]) == 2
    assert "fix: precision" not in capsys.readouterr().err, "who types fp32 has a reason"


def test_each_point_of_a_sweep_is_looked_at(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = [*SEVEN_B[:-1], "train.micro_batch_size=1", "activation_checkpointing=full", "checkpoint=none"]
    assert main(["launch", "-m", *words, "strategy=fsdp,ddp"]) == 2
    assert "strategy=ddp: needs " in capsys.readouterr().err and not list(tmp_path.iterdir())
    assert main(["launch", "-m", *words, "strategy=fsdp,tensor", "dry_run=true"]) == 0


@settings(max_examples=8, deadline=None)
@given(st.sampled_from(["ddp", "fsdp", "tensor", "pipeline"]), st.floats(9.0, 60.0))
def test_the_nearest_layout_fits_and_nothing_nearer_does(strategy: str, memory: float) -> None:
    config = base(strategy)
    config = {**config, "hardware": {**config["hardware"], "gpu_memory_gib": memory, "usable_memory_gib": memory}}
    with mock.patch.object(nearest_fit, "MORE_NODES", (2,)):  # more of them are found in the same way, and take seconds
        found = nearest_fit.nearest(config)
    if found is None:
        return
    words, prediction = found
    assert prediction.fits
    for typed, variant in nearest_fit.changes(config):
        expected = predict_layout(layout_of(variant), prediction.task, timed=False)
        if typed == words:
            assert expected.memory_bytes == prediction.memory_bytes
            break
        assert not expected.fits, f"{typed} is nearer"


@functools.cache
def composed() -> dict[str, Any]:
    words = ["model=llama-1b", "data=synthetic", "precision=bf16", "train.global_batch_size=64", "cluster=infiniband"]
    return compose(*words)


def base(strategy: str) -> dict[str, Any]:
    config = composed()
    return {**config, "strategy": strategy_section(strategy), "choices": {**config["choices"], "strategy": strategy}}


def test_what_is_changed_first() -> None:
    """A smaller micro-batch, then checkpointing, its cheapest kind first, then another strategy."""
    order = [" ".join(typed) for typed, _ in nearest_fit.changes(base("ddp"))]
    assert order[0] == "train.micro_batch_size=4" and order[2] == "train.micro_batch_size=1"
    assert order[3:5] == ["activation_checkpointing=ops", "activation_checkpointing=ops train.micro_batch_size=4"]
    assert order[7] == "activation_checkpointing=full"
    assert order[11] == "strategy=fsdp" and order[-1].startswith("strategy=fsdp activation_checkpointing=full train.")


def test_kinds_of_checkpointing_that_keep_less() -> None:
    assert nearest_fit.modes("none", compiled=True) == ["none", "ops", "full"]
    assert nearest_fit.modes("none", compiled=False) == ["none", "full"], "ops costs an eager run's host more than full"
    assert nearest_fit.modes("ops", compiled=True) == ["ops", "full"] and nearest_fit.modes("full", compiled=True) == [
        "full"
    ]


def test_settings_of_a_strategy_that_is_replaced_are_named() -> None:
    config = compose(
        "model=llama-1b", "data=synthetic", "strategy=tensor", "strategy.tp=2", "strategy.loss_parallel=true"
    )
    assert run_prediction.left_out(config, ["strategy=fsdp", "train.micro_batch_size=1"]) == (
        " without strategy.tp strategy.loss_parallel"
    )
    assert (
        run_prediction.left_out(config, ["strategy=3d", "strategy.tp=2"])
        == run_prediction.left_out(config, ["force=true"])
        == ""
    )


@pytest.mark.usefixtures("gpus")
@pytest.mark.parametrize("group", ["strategy", "optim"])
def test_a_strategy_or_optimizer_of_ones_own_is_not_predicted(group: str) -> None:
    config = compose("hardware=h100")
    config[group] = {**config[group], "_target_": "mine.Thing"}
    assert f"{group}=" in run_prediction.plan_of(config)["reason"]


# ---- after the run -------------------------------------------------------------------------------------------


def test_figures_for_the_summary(tmp_path: Path) -> None:
    assert folder.predicted(tmp_path) is None
    (tmp_path / "plan.json").write_text(json.dumps({"reason": "no"}))
    assert folder.predicted(tmp_path) is None
    (tmp_path / "plan.json").write_text(json.dumps(PLAN | {"mfu": None}))
    assert folder.predicted(tmp_path) == {"tokens_per_s": 81920.0, "step_s": 0.4, "memory_gib": 40.0}
    cpu = PLAN | {"memory_gib": PLAN["memory_gib"] | {"limit": None}}
    (tmp_path / "plan.json").write_text(json.dumps(cpu))
    assert "memory_gib" not in (folder.predicted(tmp_path) or {}), "a process is more than its tensors"


def test_the_summary_has_them_beside_what_was_measured(tmp_path: Path) -> None:
    run_dir = world.make_run(tmp_path / "run", "train.steps=2")
    (run_dir / "plan.json").write_text(json.dumps(PLAN))
    assert world.train(run_dir) == [0]
    summary = read_json(run_dir / "summary.json")
    assert summary["predicted"] == folder.predicted(run_dir) and summary["tokens_per_s"] > 0
    assert read_run(run_dir)["step_error"] == pytest.approx(summary["tokens_per_s"] / 81920.0 - 1)
