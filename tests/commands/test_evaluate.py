"""`dtrain evaluate`: the whole split, its last incomplete batch too, in one mean."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from dtrain.cli import main
from dtrain.commands.evaluate import evaluate
from dtrain.config.build import build
from dtrain.inference.sample import load_model
from tests.world import make_run, summary, train


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    run_dir = make_run(
        tmp_path_factory.mktemp("evaluate") / "run",
        *(
            "train.stop_after=3",
            "checkpoint.every=1",
            "train.eval_batches=1",
            "data.num_samples=410",
            "train.global_batch_size=8",
        ),
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


def test_progress_is_on_stderr(run: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dtrain.commands.evaluate.QUIET_S", 0.0)
    assert main(["evaluate", str(run), "--json", "--batch-size", "5"]) == 0
    shown = capsys.readouterr()
    assert shown.err.splitlines()[-1].endswith(" batches, 0 s left") and json.loads(shown.out)["loss"] > 0


def test_the_command(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["evaluate", str(run)]) == 0
    assert "perplexity" in capsys.readouterr().out
    assert main(["evaluate", str(run), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert abs(found["loss"] - summary(run)["val_loss"]) < 0.2, "that one is of one batch"
    assert main(["evaluate", str(run), "--batch-size", "8", "train.seed=1"]) == 2
    assert "train.seed=1: only the data may differ" in capsys.readouterr().err, "a word after a flag"
    assert main(["evaluate", str(run), "--batch-size", "0"]) == 2
    assert "--batch-size=0" in capsys.readouterr().err


def at_step_2(run: Path) -> float:
    model, cfg = load_model(run, [], 2)
    dataset = build(cfg.data).dataset("val")
    with torch.inference_mode():
        return float(model(*dataset.batch(np.arange(len(dataset)))))


def test_data_for_another_kind_of_model(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["evaluate", str(run), "data=mnist"]) == 2
    said = capsys.readouterr().err
    assert "refers to model.image_size, which model=gpt2-tiny does not have\n  fix: data=stdlib, or a run of" in said


def test_a_checkpoint_other_than_the_newest(run: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    newest, _ = load_model(run, [])
    for word, step in ((f"{run}@3", 3), (f"{run}@step-00000002", 2)):
        assert main(["export", word, "--dtype", "float32"]) == 0
        weights = load_file(run / f"model-{step}.safetensors")
        model, _ = load_model(run, [], step)
        assert all(torch.equal(value, weights[name]) for name, value in model.state_dict().items())
        assert torch.equal(newest.state_dict()["embed.weight"], weights["embed.weight"]) == (step == 3)
    capsys.readouterr()
    assert main(["evaluate", f"{run}@2", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["step"] == 2 and found["loss"] == pytest.approx(at_step_2(run), abs=1e-6)
    assert main(["evaluate", f"{run}@4"]) == 2
    assert "it has 1, 2, 3\n  fix: " + f"{run}@3" in capsys.readouterr().err
    damaged = tmp_path / "damaged"
    shutil.copytree(run, damaged)
    file = damaged / "checkpoints" / "step-00000002" / "rank-00000.safetensors"
    file.write_bytes(file.read_bytes()[:-1] + b"\x55")
    assert main(["export", f"{damaged}@2"]) == 2
    assert "is damaged" in capsys.readouterr().err
    assert not list((damaged / "checkpoints").glob("*.corrupt*")), "a reader changes nothing"
    assert main(["export", f"{damaged}@1"]) == 0
