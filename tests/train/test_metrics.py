"""metrics.jsonl, line by line."""

from __future__ import annotations

import math
from types import SimpleNamespace

import pytest

from dtrain.train import metrics


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


def test_top_5_of_few_classes_is_not_reported() -> None:
    classifier = SimpleNamespace(eval_metrics=("accuracy", "top5"))
    assert metrics.evaluated(classifier, [2.0, 0.5, math.nan]).keys() == {"val_loss", "val_accuracy"}
    assert metrics.evaluated(classifier, [2.0, 0.5, 0.75])["val_top5"] == 0.75
