"""The hooks of docs/your-own.md, run as the page shows them."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from dtrain.commands.evaluate import evaluate
from dtrain.launch.arguments import prepare_arguments
from dtrain.launch.python_objects import spell
from tests.test_docs import files_of
from tests.world import ROOT, make_run, metrics, summary, train

PAGE = (ROOT / "docs" / "your-own.md").read_text()
COMMAND = next(line for line in PAGE.splitlines() if line.startswith("    python launch.py") and "hooks=" in line)
# of make_run's model and data, which are another's here
OTHERS = ("model.", "data=")


@pytest.fixture
def page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    for name, text in files_of(PAGE).items():
        (tmp_path / name).write_text(text)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("DTRAIN_IMPORT_FROM", str(tmp_path))
    yield tmp_path
    for name in ("net", "my_hooks"):
        sys.modules.pop(name, None)


def hooked(path: Path, monkeypatch: pytest.MonkeyPatch, *words: str) -> Path:
    from tests import world

    monkeypatch.setattr(world, "SMALL", [word for word in world.SMALL if not word.startswith(OTHERS)])
    return make_run(path, *prepare_arguments([*shlex.split(COMMAND)[2:], "train.eval_batches=2", *words]))


def test_the_settings_of_a_hook_by_fit(page: Path) -> None:
    import functools

    from my_hooks import Accuracy, Smoothed  # type: ignore[import-not-found]

    for hook in ((Smoothed, {"every": 5}), functools.partial(Smoothed, 5)):
        overrides, folders = spell({"hooks": [Accuracy, hook, ("early_stop", {"patience": 2})]})
        assert overrides == [
            "hooks=[my_hooks.Accuracy,my_hooks.Smoothed,early_stop]",
            "hooks.Smoothed.every=5",
            "hooks.early_stop.patience=2",
        ]
        assert {folder.resolve() for folder in folders} == {page.resolve()}
    assert spell({"hooks": Accuracy})[0] == ["hooks=[my_hooks.Accuracy]"]
    assert spell({"hooks": "early_stop"})[0] == ["hooks=early_stop"] and spell({"hooks": []})[0] == ["hooks=none"]
    with pytest.raises(ValueError, match="is an object of this process"):
        spell({"hooks": [Accuracy()]})


@pytest.mark.parametrize(("strategy", "size"), [("ddp", 1), ("ddp", 2), ("fsdp", 2), ("zero1", 2)])
def test_the_page(strategy: str, size: int, page: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hooks = "hooks=[my_hooks.Accuracy,my_hooks.Smoothed,my_hooks.Confidence]"
    more = [f"strategy={strategy}", f"cluster.processes={size}", "train.micro_batch_size=2", "train.steps=10"]
    run = hooked(page / "run", monkeypatch, hooks, *more, "train.eval_every=5")
    monkeypatch.setenv("PYTHONPATH", str(page))
    assert train(run, size, {"PYTHONPATH": str(page)}) == [0] * size
    steps = [line for line in metrics(run) if "train_accuracy" in line]
    assert [line["step"] for line in steps] == list(range(1, 11))
    assert all(0 <= line["train_accuracy"] <= 1 and (line["train_accuracy"] * 8) % 1 == 0 for line in steps), "of 8"
    assert [line["step"] for line in metrics(run) if "smoothed_loss" in line] == [5, 10]
    found = summary(run)
    assert 0 <= found["val_accuracy"] <= 1 and 1 / 3 <= found["confidence"] <= 1
    if (strategy, size) == ("ddp", 1):
        again = evaluate(run, trust=["net", "my_hooks"])
        assert again["targets"] == 200 and 0 <= again["accuracy"] <= 1
        from net import rings  # type: ignore[import-not-found]

        from dtrain.inference.sample import load_model

        model, _ = load_model(run, ["net", "my_hooks"])
        inputs, targets = rings()["val"]
        with torch.no_grad():
            right = (model(inputs).argmax(-1) == targets).float().mean().item()
        assert again["accuracy"] == pytest.approx(right, abs=1e-6)
        assert "confidence" in again
