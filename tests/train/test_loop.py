"""The loop's own promises: what it records, what it refuses, and which exit code a failure has."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from dtrain.cli import main
from dtrain.commands.verify.world import World, train_rank
from dtrain.config.build import build
from dtrain.inference.sample import load_model
from tests.world import losses, make_run, metrics, start_server, summary, train

KEYS = {"step", "loss", "lr", "grad_norm", "tokens", "tokens_per_s", "step_s", "data_s", "mfu", "mem_gib", "time"}


def failure(run: Path) -> dict[str, object]:
    note: dict[str, object] = json.loads((run / "logs" / "failure-0.json").read_text())
    return note


def test_metrics_and_summary_have_the_names_that_scripts_rely_on(tmp_path: Path) -> None:
    run = make_run(
        tmp_path / "run", "cluster.processes=1", "train.steps=6", "train.eval_every=3", "train.eval_batches=2"
    )
    assert train(run) == [0]
    steps = [m for m in metrics(run) if "loss" in m]
    assert [m["step"] for m in steps] == [1, 2, 3, 4, 5, 6] and all(set(m) == KEYS for m in steps)
    assert steps[-1]["tokens"] == 6 * 8 * 16 and steps[0]["mfu"] is None, "a CPU has no published peak"
    evaluations = [m for m in metrics(run) if "val_loss" in m]
    assert [m["step"] for m in evaluations] == [3, 6]
    final = summary(run)
    assert final["status"] == "done" and final["steps"] == 6 and final["val_loss"] == evaluations[-1]["val_loss"]
    assert final["train_loss"] == steps[-1]["loss"] and len(final["weights_sha256"]) == 64
    for key in ("val_accuracy", "evaluated", "tokens_per_s", "mfu", "peak_mem_gib", "wall_s", "predicted"):
        assert key in final


def test_stop_after_saves_and_the_schedule_still_aims_at_the_end(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", "cluster.processes=1", "train.stop_after=7")
    whole = make_run(tmp_path / "whole", "cluster.processes=1")
    assert train(run) == [0] and train(whole) == [0]
    assert summary(run)["steps"] == 7 and (run / "checkpoints" / "step-00000007").is_dir()
    rates = [[m["lr"] for m in metrics(r) if "lr" in m] for r in (run, whole)]
    assert rates[0] == rates[1][:7]
    assert losses(run) == {s: x for s, x in losses(whole).items() if s <= 7}


def test_a_validation_split_smaller_than_a_batch(tmp_path: Path) -> None:
    """As many whole micro-batches of it as there are; where there is none, that is a bad configuration."""
    small = ["cluster.processes=1", "train.eval_batches=4", "data.num_samples=70"]  # 7 are held out, a batch has 8
    run = make_run(tmp_path / "run", *small, "train.micro_batch_size=2", "train.stop_after=1")
    assert train(run) == [0]
    model, cfg = load_model(run, [])
    with torch.no_grad():
        loss = model(*build(cfg.data).dataset("val").batch(np.arange(6))).item()
    assert summary(run)["val_loss"] == pytest.approx(loss, abs=1e-6)
    broken = make_run(tmp_path / "broken", *small)
    assert train(broken) == [2]
    assert "has only 7 validation samples" in str(failure(broken)["message"])


def test_other_data_is_refused_on_resume_unless_allowed(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", "cluster.processes=1", "train.stop_after=4")
    assert train(run) == [0]
    make_run(run, "cluster.processes=1", "data.num_samples=999")
    assert train(run) == [2]
    assert "10000 samples then, 999 samples now" in str(failure(run)["message"])
    make_run(run, "cluster.processes=1", "data.num_samples=999", "resume_allow=[data]")
    assert train(run) == [0]


def test_a_value_error_in_a_step_is_a_failure_and_no_bad_configuration(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "odd_model.py").write_text(
        "from dtrain.models.gpt2 import GPT2\n"
        "class Odd(GPT2):\n"
        "    def forward(self, inputs, targets=None):\n"
        "        raise ValueError('shapes do not match')\n"
    )
    run = make_run(tmp_path / "run", "cluster.processes=1", "model._target_=odd_model.Odd", "trust=[odd_model]")
    assert train(run) == [3]


def test_a_run_folder_is_not_trusted_for_what_it_names(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = make_run(
        tmp_path / "run",
        "cluster.processes=1",
        "train.steps=2",
        f"+data.path={tmp_path / 'ids'}",
        "data._target_=tests.recording.Recorder",
        "trust=[tests]",
        "data.num_samples=300",
    )
    assert train(run) == [0]
    (run / "launch.json").write_text("{}")
    assert main(["sample", str(run), "x", "--tokens", "2"]) == 2
    assert "trust=[tests]" in capsys.readouterr().err
    assert main(["sample", str(run), "x", "--tokens", "2", "--trust", "tests"]) == 2
    assert "tokens that the model does not know" in capsys.readouterr().err, "x is 120, the vocabulary 61"
    assert main(["sample", str(run), "\n", "--tokens", "2", "--trust", "tests"]) == 0


def uncompiled_rank(run_dir: Path) -> int:
    """Train without the compiler that was asked for, and leave what this rank said in a file."""
    from dtrain.strategies import ddp

    patched: Any = ddp
    patched.compile_model = lambda model, mode: None
    return train_rank(run_dir)


@pytest.mark.parametrize(("compile", "times"), [("blocks", 1), ("none", 0)])
def test_rank_0_says_that_a_first_step_compiles(compile: str, times: int, tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", "cluster.processes=2", f"compile={compile}", "train.stop_after=2")
    start_server()
    assert World(2, uncompiled_rank, run).join() == [0, 0]
    said = [(run / "logs" / f"rank-{rank}.log").read_text() for rank in (0, 1)]
    assert [text.count("compiling the model: the first step takes longer") for text in said] == [times, 0]
    assert summary(run)["compile"] == compile


CLOSING = """
from pathlib import Path
from dtrain.strategies.ddp import DDP

class Closing(DDP):
    def close(self):
        folder = Path(__file__).parent
        saved = sorted(path.name for path in (folder / "run" / "checkpoints").glob("step-*"))
        with open(folder / "closed", "a") as file:
            file.write(f"{saved[-1]}\\n")
"""


def test_a_strategy_is_closed_once_after_the_last_save(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It may have files on a disk that would stay."""
    (tmp_path / "closing.py").write_text(CLOSING)
    monkeypatch.syspath_prepend(tmp_path)
    words = ["strategy._target_=closing.Closing", "trust=[closing]", "cluster.processes=1", "train.steps=2"]
    run = make_run(tmp_path / "run", *words)
    assert train(run) == [0]
    assert (tmp_path / "closed").read_text() == "step-00000002\n"
