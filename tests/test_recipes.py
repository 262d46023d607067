"""Every recipe: complete, refused by no rule, its command can be shown; and its tiny twin trains."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from dtrain.cli import main
from dtrain.commands.verify import compare, world
from dtrain.config.run_file import save
from dtrain.launch.arguments import prepare_arguments
from dtrain.launch.recipes import built_in, store_recipe
from dtrain.launch.resolve import resolve
from tests.world import losses, start_server, summary

RECIPES = built_in()
SCRIPTS = [name for name, path in RECIPES.items() if "\nscript:" in path.read_text()]  # programs of their own
FULL = [name for name in RECIPES if "/" not in name and name not in SCRIPTS]
TWINS = [name for name in RECIPES if name.startswith("tiny/") and name != "tiny/small"]
SMALL_ALREADY = {"cpu-tiny", "mnist-ddp", "search-lr"}  # CI trains these themselves, elsewhere
# what the issue of recipes promises: one a row of the matrix that users know
PROMISED = {
    "mnist-ddp", "resnet50-ddp-8gpu", "vit-imagenet-ddp", "gpt2-1.5b-fsdp-4gpu", "llama-7b-zero3-8gpu",
    "llama-7b-zero3-offload", "llama-70b-3d-64gpu", "llama-lora-fsdp", "bert-large-finetune", "gpt2-124m-single-gpu",
    "cpu-tiny",
}  # fmt: skip


def test_there_is_a_recipe_for_every_row_and_a_twin_for_every_recipe() -> None:
    assert set(FULL) >= PROMISED
    assert {f"tiny/{name}" for name in FULL} - {f"tiny/{name}" for name in SMALL_ALREADY} == set(TWINS)


@pytest.mark.parametrize("name", FULL)
def test_a_recipe_says_what_to_expect(name: str) -> None:
    text = RECIPES[name].read_text()
    header = " ".join(line.lstrip("# ") for line in text.splitlines() if line.startswith("#"))
    if name == "search-lr":
        return
    assert "For: " in header and "Hardware: " in header
    assert re.search(r"Measured|Predicted", header), "and whether that was measured"
    assert re.search(r"GiB", header) and re.search(r"(tokens|images|pictures|samples|texts)/s", header)
    assert re.search(r"\d (hours|minutes|s\b)", header), "how long it takes"


@pytest.mark.parametrize("name", FULL)
def test_a_recipe_is_compiled_as_is_the_default(name: str) -> None:
    """What is fastest under a strategy is decided in one place."""
    assert compare.compose(prepare_arguments([f"recipe={name}"])).compile == compare.compose([]).compile


@pytest.mark.parametrize("name", FULL)
def test_a_recipe_shows_its_command(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["launch", f"recipe={name}", "dry_run=true"]) == 0, capsys.readouterr().err
    shown = capsys.readouterr().out
    assert "torchrun" in shown or "#SBATCH" in shown or "torch.distributed.run" in shown


@pytest.mark.parametrize("name", TWINS)
def test_a_twin_has_the_strategy_of_its_recipe(name: str) -> None:
    twin, recipe = (compare.compose(prepare_arguments([f"recipe={n}"])) for n in (name, name.removeprefix("tiny/")))
    assert twin.strategy._target_ == recipe.strategy._target_
    assert twin.strategy.get("offload") == recipe.strategy.get("offload")
    assert twin.activation_checkpointing == recipe.activation_checkpointing
    family = "dtrain.models.resnet" if "resnet" in name else recipe.model._target_
    assert twin.model._target_.startswith(family)
    assert bool(twin.lora.rank) == bool(recipe.lora.rank)


@pytest.mark.parametrize("name", TWINS)
def test_a_twin_trains(name: str, tmp_path: Path) -> None:
    cfg = compare.compose([*prepare_arguments([f"recipe={name}"]), f"run_dir={tmp_path}/run"])
    config = resolve(cfg)
    run_dir = tmp_path / "run"
    (run_dir / "logs").mkdir(parents=True)
    save(run_dir, config)
    start_server()
    with world.World(config["cluster"]["processes"], world.train_rank, run_dir) as ranks:
        assert not world.failure(run_dir, ranks.join(150))
    curve = losses(run_dir)
    assert len(curve) == config["train"]["steps"] and summary(run_dir)["status"] == "done"
    first, last = (sum(values) / 5 for values in (list(curve.values())[:5], list(curve.values())[-5:]))
    print(name, first, last)
    assert last < first - 0.05, "it learns"


def test_a_copied_recipe_may_build_on_another(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    mine = tmp_path / "mine.yaml"
    mine.write_text("defaults:\n  - /recipe/llama-7b-zero3-8gpu\n  - _self_\ntrain:\n  steps: 7\n")
    store_recipe(mine)
    cfg = compare.compose(prepare_arguments([f"recipe={mine}", "cluster.processes=4"]))
    assert (cfg.train.steps, cfg.cluster.processes, cfg.activation_checkpointing) == (7, 4, "full")


def test_a_program_is_copied_itself(tmp_path: Path, monkeypatch: Any, capsys: pytest.CaptureFixture[str]) -> None:
    """A copied file may not name a program: anyone could have written it."""
    monkeypatch.chdir(tmp_path)
    assert main(["recipes", "cp", "tf-multiworker-digits"]) == 0
    said = capsys.readouterr().out
    assert "script=./tf_multiworker_digits.py 'script_args=[--epochs,15]' script.env=tensorflow" in said
    assert "MultiWorkerMirroredStrategy" in (tmp_path / "tf_multiworker_digits.py").read_text()
