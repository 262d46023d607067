"""metrics.jsonl, line by line."""

from __future__ import annotations

import json
import math
from pathlib import Path
from types import SimpleNamespace

import pytest

from dtrain.train import metrics


def test_a_line_reads_back_exactly_and_what_is_not_finite_is_null(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    values = {"step": 7, "loss": 1 / 3, "lr": 1e-300, "mfu": None, "tokens": 2**60}
    record = metrics.Recorder(tmp_path, 0)
    monkeypatch.setattr(metrics.time, "time", lambda: 1700000000.12345)
    record.write(**values)
    record.write(step=8, loss=math.nan, grad_norm=math.inf, lr=0.1)
    first, second = (tmp_path / "metrics.jsonl").read_text().splitlines()  # while the file is still open
    assert json.loads(first) == values | {"time": 1700000000.123}
    assert second == '{"step": 8, "loss": null, "grad_norm": null, "lr": 0.1, "time": 1700000000.123}'


def test_a_resume_drops_the_steps_that_are_done_again(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}\n{"step": 2}\n{"step": 3}\n{"st')
    metrics.Recorder(tmp_path, 2).write(step=3, loss=1.0)
    lines = (tmp_path / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == [1, 2, 3]


def test_the_memory_of_a_gpu_is_the_allocators_peak(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    figures = {"allocated_bytes": {"all": {"current": 2**30, "peak": 3 * 2**30}}}
    monkeypatch.setattr(torch.cuda, "memory_stats_as_nested_dict", lambda device: figures)
    assert metrics.memory_gib(torch.device("cuda", 0)) == 3.0


def test_perplexity_is_for_models_that_say_so() -> None:
    """A user's model may say nothing of it, as the classifiers do not."""
    classifier = SimpleNamespace(eval_metrics=("accuracy",))
    assert metrics.evaluated(classifier, [2.0, 0.5]) == {"val_loss": 2.0, "val_accuracy": 0.5}
    language = SimpleNamespace(perplexity=True)
    assert metrics.evaluated(language, [2.0]) == {"val_loss": 2.0, "val_perplexity": math.exp(2.0)}
