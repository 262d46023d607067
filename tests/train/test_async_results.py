"""The loop as a GPU runs it: a step's metrics are read while the next one computes. Here on a CPU, by a stand-in."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from dtrain.commands.verify.world import World
from tests.world import losses, make_run, metrics, start_server, summary, train

OPTIONS = ["train.steps=9", "train.eval_every=4", "train.eval_batches=1", "checkpoint.every=3", "cluster.processes=1"]


def late_rank(run_dir: Path, broken_step: int) -> int:
    """Train with results that come late; the loss of one step is NaN."""
    from torch import Tensor

    from dtrain.strategies import base
    from dtrain.train import loop

    class Here(base.LateResult):
        def __init__(self, metrics: Tensor) -> None:
            self.metrics, self.arrived = metrics.clone(), SimpleNamespace(synchronize=lambda: None)  # type: ignore[assignment]

    def forward_backward(self: base.Strategy, inputs: Tensor, targets: Tensor) -> Tensor:
        steps.append(1)
        loss = before(self, inputs, targets)
        return loss * float("nan") if len(steps) == broken_step else loss

    steps: list[int] = []
    before: Any = base.Strategy.forward_backward
    patched: Any = base
    patched.LateResult, patched.Strategy.forward_backward = Here, forward_backward
    patched.Strategy.decides_on_device = lambda self: True
    return loop.main(run_dir)


def train_late(run: Path, broken_step: int = 0) -> list[int | None]:
    start_server()
    return World(1, late_rank, run, broken_step).join()


@pytest.fixture(scope="module")
def usual(tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = make_run(tmp_path_factory.mktemp("usual"), *OPTIONS)
    assert train(run, 1) == [0]
    return run


def test_it_is_the_same_run(usual: Path, tmp_path: Path) -> None:
    run = make_run(tmp_path, *OPTIONS)
    assert train_late(run) == [0]
    assert losses(run) == losses(usual)
    same = ("weights_sha256", "val_loss", "train_loss", "steps", "skipped_steps")
    assert {k: summary(run)[k] for k in same} == {k: summary(usual)[k] for k in same}
    steps = [m["step"] for m in metrics(run) if "loss" in m]
    assert steps == list(range(1, 10)), "each step once, in its order"
    assert all(m["step_s"] > 1e-4 for m in metrics(run) if "step_s" in m), "no step takes the time of two"


def test_a_step_that_is_not_finite_stops_the_run_and_none_after_it_is_saved(tmp_path: Path) -> None:
    run = make_run(tmp_path, *OPTIONS)
    assert train_late(run, broken_step=5) == [3]
    assert max(losses(run)) == 4
    assert sorted(p.name for p in (run / "checkpoints").glob("step-*")) == ["step-00000003"]


def test_or_is_skipped(tmp_path: Path) -> None:
    run = make_run(tmp_path, *OPTIONS, "train.nonfinite=skip")
    assert train_late(run, broken_step=5) == [0]
    assert summary(run)["skipped_steps"] == 1
    assert [m["step"] for m in metrics(run) if "grad_norm" in m] == list(range(1, 10))


def test_a_run_of_an_older_version_goes_on_as_it_was_meant(usual: Path, tmp_path: Path) -> None:
    """A job that SLURM starts again reads config.yaml as an older launcher wrote it."""
    from omegaconf import OmegaConf

    run = make_run(tmp_path, *OPTIONS)
    old = OmegaConf.load(run / "config.yaml")
    for section, key in (
        (old, "profile"),
        (old, "nsys"),
        (old, "cuda_graphs"),
        (old, "fused_loss"),
        (old.checkpoint, "background"),
    ):
        del section[key]
    del old.precision["stream"]
    OmegaConf.save(old, run / "config.yaml")
    assert train(run, 1) == [0]
    assert losses(run) == losses(usual)
