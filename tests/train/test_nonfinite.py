"""A loss or gradient that is not finite: where it comes from, and a command that helps."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from dtrain.report.why import diagnose
from dtrain.runs.record import Record
from dtrain.train.nonfinite import smaller
from dtrain.ui.console import next_commands, recommended, skipped_text
from tests.world import make_run, train

NET = """
import torch
from torch import nn
class Net(nn.Module):
    def __init__(self, bad="", **sizes):
        super().__init__()
        self.bad, self.a, self.b = bad, nn.Linear(8, 8), nn.Linear(8, 3)
        if bad == "weight":
            nn.init.constant_(self.b.bias, float("inf"))
    def forward(self, x):
        x = self.a(x)
        if self.bad == "forward":
            x = torch.log(-x.abs())
        return self.b(x) + (torch.sqrt(0 * x.sum()) if self.bad == "gradient" else 0)
class Normed(Net):
    def __init__(self, **sizes):
        super().__init__()
        self.a = nn.BatchNorm1d(8)
def points(split, **more):
    draw = torch.Generator().manual_seed(0)
    return torch.randn(64, 8, generator=draw), torch.randint(3, (64,), generator=draw)
"""
SETTINGS = ("loss=cross_entropy", "cluster.processes=1", "train.steps=6", "schedule.warmup_steps=0")


@pytest.fixture(autouse=True)
def importable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "broken_net.py").write_text(NET)
    monkeypatch.syspath_prepend(tmp_path)


def failed(tmp_path: Path, *overrides: str) -> tuple[Path, dict[str, Any]]:
    own = ["model._target_=broken_net.Net", "data._target_=broken_net.points", "trust=[broken_net]"]
    run = make_run(tmp_path / "run", *own, *SETTINGS, *overrides)
    assert train(run, 1, {"PYTHONPATH": str(tmp_path)}) == [3]
    note = json.loads((run / "logs" / "failure-0.json").read_text())
    assert note["type"] == "NonFiniteError"
    (run / "failure.json").write_text(json.dumps(note))
    return run, note


@pytest.mark.parametrize(
    ("bad", "place"),
    [
        ("forward", "in the inputs of the layer b (Linear): look before it in Net"),
        ("weight", "The weight b.bias is not finite"),
        ("gradient", "The loss is finite, but the gradient is NaN: "),
    ],
)
def test_nan_in_the_first_step_names_the_place_and_not_the_learning_rate(tmp_path: Path, bad: str, place: str) -> None:
    run, note = failed(tmp_path, f"+model.bad={bad}")
    assert place in note["message"] and "it is not the learning rate" in note["message"]
    assert "optim.lr" not in note["message"] and not recommended(run)
    if bad == "gradient":
        assert note["frames"][-1]["text"].startswith("return self.b(x)")


def test_a_run_whose_every_step_was_skipped_has_failed(tmp_path: Path) -> None:
    """Under fp16 each NaN gradient looks like an overflow, so the run would go on to its end."""
    _, note = failed(tmp_path, "+model.bad=gradient", "precision=fp16")
    assert note["message"].startswith("all 6 steps were skipped, so nothing was trained")
    assert "the gradient is NaN" in note["message"]


def test_a_run_that_ends_before_the_loss_scale_has_settled_is_done(tmp_path: Path) -> None:
    settings = ["precision=fp16", "precision.init_scale=1e30", "train.steps=1", "cluster.processes=1"]
    run = make_run(tmp_path / "run", *settings)
    assert train(run, 1) == [0]
    assert "nothing was trained" in skipped_text(json.loads((run / "summary.json").read_text()))


def test_a_second_look_leaves_the_statistics_of_batch_norm_as_they_are(tmp_path: Path) -> None:
    """The run continues after it, and saves them."""
    own = ["model._target_=broken_net.Normed", "data._target_=broken_net.points", "trust=[broken_net]"]
    settings = ["precision=fp16", "precision.init_scale=1e30", "train.steps=2"]
    run = make_run(tmp_path / "run", *own, *SETTINGS, *settings)
    assert train(run, 1, {"PYTHONPATH": str(tmp_path)}) == [0]
    saved = load_file(run / "checkpoints" / "step-00000002" / "rank-00000.safetensors")
    assert saved["model.a.num_batches_tracked"] == 2


def test_a_loss_that_diverged_gives_a_command_with_a_smaller_rate(tmp_path: Path) -> None:
    run, note = failed(tmp_path, "optim.lr=1e30")
    assert "a smaller optim.lr (now 1e+30)" in note["message"] and "bf16" not in note["message"]
    (run / "launch.json").write_text('{"launches": [{}]}')
    (run / "summary.json").write_text('{"status": "failed", "steps": 1, "precision": "fp32"}')
    command = next_commands(run, "failed", {"steps": 1})[-1]
    assert command.endswith("optim.lr=0.001 'resume_allow=[optim.lr]'")
    found = diagnose(Record.read(run))
    assert found.next == [command] and "smaller optim.lr" in found.paragraph


def test_fp16_recommends_bf16(tmp_path: Path) -> None:
    run, note = failed(tmp_path, "optim.lr=1e4", "precision=fp16", "train.steps=40")
    assert "precision=bf16" in note["message"]
    assert recommended(run) == ["precision=bf16", "'resume_allow=[precision]'"]


def test_a_recommendation_from_a_file_of_someone_else_is_not_a_command(tmp_path: Path) -> None:
    change = {"optim.lr": "1; rm -rf x", "precision": "$(x)", "trust": "[x]"}
    (tmp_path / "failure.json").write_text(json.dumps({"change": change}))
    assert recommended(tmp_path) == []


def test_a_smaller_rate_has_one_digit() -> None:
    assert [smaller(lr) for lr in (3e-3, 6e-4, 0.5, 1e3)] == [3e-4, 6e-5, 0.05, 1e-3]
