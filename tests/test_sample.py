"""What comes out of a run: text, and one file of weights that needs no dtrain."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from dtrain import checkpoint
from dtrain.cli import main
from dtrain.sample import pick, sample
from tests.world import make_run, train


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = make_run(
        tmp_path_factory.mktemp("sample"),
        "strategy=fsdp",
        "cluster.processes=2",
        "model.vocab_size=256",
        "data=text",
        f"data.path={Path(__file__).parent}",
        "data.pattern='**/*.py'",
        "train.steps=30",
    )
    assert train(folder, 2) == [0, 0]
    (folder / "launch.json").write_text('{"launches": []}')
    return folder


def test_sample_goes_on_with_the_prompt_and_is_repeatable(run: Path) -> None:
    first = sample(run, "def test", 30, 0.8, 50, seed=1)
    assert first.startswith("def test") and len(first) > len("def test")
    assert first == sample(run, "def test", 30, 0.8, 50, seed=1)
    assert first != sample(run, "def test", 30, 0.8, 50, seed=2)


def test_pick_keeps_to_the_top_k() -> None:
    logits = torch.tensor([[0.0, 5.0, 4.0, -1.0]])
    generator = torch.Generator().manual_seed(0)
    assert {pick(logits, 10.0, 2, generator).item() for _ in range(100)} == {1, 2}
    assert {pick(logits, 10.0, 0, generator).item() for _ in range(200)} == {0, 1, 2, 3}
    assert pick(logits, 0, 0, generator).item() == 1


def test_export_loads_without_dtrain(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target = tmp_path / "out" / "model.safetensors"
    assert main(["export", str(run), str(target)]) == 0
    expected = dict(checkpoint.weights(run / "checkpoints" / "step-00000030"))
    loaded = load_file(target)
    assert loaded.keys() == expected.keys() and all(torch.equal(loaded[k], v) for k, v in expected.items())
    script = f"import sys, safetensors.torch as s; s.load_file({str(target)!r}); assert 'dtrain' not in sys.modules"
    subprocess.run([sys.executable, "-c", script], check=True, cwd="/")


def test_a_run_without_a_checkpoint_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = make_run(tmp_path / "fresh")
    (folder / "launch.json").write_text('{"launches": []}')
    assert main(["sample", str(folder), "x"]) == 2
    assert "has no checkpoint yet" in capsys.readouterr().err
