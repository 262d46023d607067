"""`dtrain evaluate`: the whole split, its last incomplete batch too, in one mean."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch

from dtrain.cli import main
from dtrain.commands.evaluate import evaluate
from dtrain.config.build import build
from dtrain.inference.sample import load_model
from tests.world import make_run, summary, train


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    run_dir = make_run(
        tmp_path_factory.mktemp("evaluate") / "run",
        *("train.stop_after=3", "train.eval_batches=1", "data.num_samples=410", "train.global_batch_size=8"),
    )
    assert train(run_dir) == [0]
    (run_dir / "launch.json").write_text("{}")  # by which a run is found
    return run_dir


def test_the_mean_is_over_every_sample(run: Path) -> None:
    model, cfg = load_model(run, [])
    dataset = build(cfg.data).dataset("val")
    with torch.inference_mode():
        losses = [model(*dataset.batch(np.array([i]))).item() for i in range(len(dataset))]
    found = evaluate(run, batch_size=3)
    assert len(dataset) % 3, "or there is no incomplete batch"
    assert found["samples"] == len(dataset) and found["targets"] == len(dataset) * cfg.model.seq_len
    assert found["loss"] == pytest.approx(np.mean(losses), abs=1e-6)
    assert found["perplexity"] == pytest.approx(math.exp(found["loss"]))
    assert found["loss"] == pytest.approx(evaluate(run, batch_size=50)["loss"], abs=1e-6)
    assert found["loss"] != pytest.approx(evaluate(run, split="train")["loss"], abs=1e-6)


def test_the_command(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["evaluate", str(run)]) == 0
    assert "perplexity" in capsys.readouterr().out
    assert main(["evaluate", str(run), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert abs(found["loss"] - summary(run)["val_loss"]) < 0.2, "that one is of one batch"
    assert main(["evaluate", str(run), "--batch-size", "0"]) == 2
    assert "--batch-size=0" in capsys.readouterr().err
