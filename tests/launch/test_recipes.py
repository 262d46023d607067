"""Recipe files of the user: what they set, and what they cannot reach."""

from __future__ import annotations

from pathlib import Path

import pytest

from dtrain.cli import main
from tests.launch.dry_launches import read, run, started

__all__ = ["started"]


def test_a_recipe_is_a_start_and_the_command_line_wins(started: list[Path], tmp_path: Path) -> None:
    (tmp_path / "my own.yaml").write_text(
        "defaults:\n  - override /strategy: fsdp\n  - override /model: gpt2-tiny\ntrain: {steps: 11, seed: 5}\n"
    )
    run("recipe=my own.yaml", "train.seed=6", "run_dir=out")
    config = read(started[0])
    assert (config["choices"]["strategy"], config["train"]["steps"], config["train"]["seed"]) == ("fsdp", 11, 6)
    assert config["choices"]["recipe"] == "my own"


@pytest.mark.parametrize("line", ["lr: 0.1", "optim.lr: 0.1"])
def test_a_fix_for_a_recipe_is_a_line_of_it(line: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recipe = tmp_path / "mine.yaml"
    recipe.write_text(f"train: {{steps: 3}}\n{line}\n")
    assert main(["launch", f"recipe={recipe}"]) == 2
    error = capsys.readouterr().err
    assert f"{recipe}:2: {line.partition(':')[0]}: there is no" in error and "fix: optim: {lr: 0.1}" in error, error


@pytest.mark.parametrize(
    "text",
    [
        "hydra:\n  callbacks:\n    x:\n      _target_: evil_module.Thing\n",
        "defaults:\n  - override hydra/launcher: evil\n",
        "defaults:\n  - /model/gpt2-tiny@hydra.callbacks.x\n",
    ],
)
def test_a_recipe_cannot_reach_hydras_own_settings(
    text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Hydra makes its callbacks before the gate looks at anything."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "evil_module.py").write_text("open('was-imported', 'w').close()\nclass Thing: pass\n")
    (tmp_path / "mine.yaml").write_text(text)
    assert main(["launch", "recipe=./mine.yaml", "dry_run=true"]) == 2
    assert "remove them from the file" in capsys.readouterr().err
    assert not (tmp_path / "was-imported").exists()
