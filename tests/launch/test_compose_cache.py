"""A command is composed once, a sweep once plus once per job, each file is parsed once; the result equals Hydra's."""

from __future__ import annotations

import io
import os
from pathlib import Path
from typing import Any

import hydra
import pytest
from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra.core.config_store import ConfigStore
from omegaconf import DictConfig, OmegaConf

from dtrain.cli import main
from dtrain.config.files import CONF
from dtrain.launch import compose_cache
from dtrain.launch.compose import hydra_config
from dtrain.launch.local import Local


@pytest.fixture
def counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What happened: each composition, and each file that was parsed. Nothing is trained."""
    events: list[str] = []

    def count(owner: Any, name: str, event: str) -> None:
        original = getattr(owner, name)

        def counting(self: Any, *args: Any, **kwargs: Any) -> Any:
            events.append(event)
            return original(self, *args, **kwargs)

        monkeypatch.setattr(owner, name, counting)

    count(ConfigLoaderImpl, "load_configuration", "composed")
    monkeypatch.setattr(compose_cache.CachedFiles, "parsed", {})
    parse = OmegaConf.load

    def counting(file: Any) -> Any:
        if isinstance(file, io.TextIOWrapper):  # as Hydra opens them; dtrain's own readers give a path
            events.append(file.name)
        return parse(file)

    monkeypatch.setattr(OmegaConf, "load", counting)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.delenv("HYDRA_FULL_ERROR", raising=False)
    monkeypatch.setattr(Local, "launch", lambda self, run_dir: 0)
    return events


def test_a_command_is_composed_once(counted: list[str]) -> None:
    assert main(["launch", "run_dir=a"]) == 0
    assert counted.count("composed") == 1
    assert main(["launch", "run_dir=b", "hydra.mode=RUN"]) == 0  # a word that may set the mode: Hydra asks as ever
    assert counted.count("composed") == 1 + 2


def test_a_job_of_a_sweep_is_composed_once(counted: list[str], tmp_path: Path) -> None:
    words = ["train.seed=1,3", "model=gpt2-tiny,llama-tiny"]
    assert main(["launch", "-m", *words, "hydra.sweep.dir=sweep"]) == 0
    assert counted.count("composed") == 1 + 4
    files = [event for event in counted if event.startswith(str(CONF))]
    assert len(files) == len(set(files)) > 10, "each file of conf/ once, for the sweep and all of its jobs"
    found = {(config["train"]["seed"], config["choices"]["model"]) for config in configs(tmp_path / "sweep")}
    assert found == {(seed, model) for seed in (1, 3) for model in ("gpt2-tiny", "llama-tiny")}

    # beside each job, the same as a command of its own
    assert main(["launch", "train.seed=3", "model=llama-tiny", "run_dir=alone"]) == 0
    [alone], jobs = configs(tmp_path, "alone"), configs(tmp_path / "sweep")
    [job] = [c for c in jobs if (c["train"]["seed"], c["choices"]["model"]) == (3, "llama-tiny")]
    assert {k: v for k, v in job.items() if k != "run_dir"} == {k: v for k, v in alone.items() if k != "run_dir"}


def test_a_default_that_follows_another_choice_is_composed_as_hydra_does(tmp_path: Path) -> None:
    for name in ("a/one", "a/two", "b/one", "b/two"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / f"{name}.yaml").write_text(f"is: {name}\n")
    (tmp_path / "top.yaml").write_text("defaults: [{a: one}, {b: '${a}'}, _self_]\n")

    def composed(overrides: list[str]) -> DictConfig:
        with hydra.initialize_config_dir(str(tmp_path), version_base="1.3"):
            return hydra.compose("top", overrides, return_hydra_config=True)

    for overrides, expected in (([], "b/one"), (["a=two"], "b/two"), (["b=two"], "b/two")):
        plain = OmegaConf.to_container(composed(overrides))
        with compose_cache.cached_files():
            for _ in range(2):
                cached = composed(overrides)
                assert OmegaConf.to_container(cached) == plain and cached.b["is"] == expected
                cached.a["is"] = cached.hydra.run.dir = "changed"  # must not reach the next composition


def test_a_recipe_brings_those_it_is_based_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    store = ConfigStore.instance().repo
    monkeypatch.setitem(store, "recipe", {})
    assert main(["launch", "recipe=tiny/vit-imagenet-ddp", "dry_run=true"]) == 0
    assert {*store["recipe"], *store["recipe"]["tiny"]} == {
        "tiny", "vit-imagenet-ddp.yaml", "small.yaml",
    }, "and no other"  # fmt: skip
    for words in ("cpu-tiny,mnist-ddp", "tiny/vit-imagenet-ddp,cpu-tiny", "choice(cpu-tiny,tiny/vit-imagenet-ddp)"):
        monkeypatch.setitem(store, "recipe", {})
        assert main(["launch", "-m", f"recipe={words}", "dry_run=true"]) == 0, words
    assert main(["launch", "recipe=no/such.yaml"]) == 2


def test_two_files_of_one_name_and_time_are_two(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, dim in (("a", 8), ("b", 9)):
        (tmp_path / name / "c" / "model").mkdir(parents=True)
        file = tmp_path / name / "c" / "model" / "mine.yaml"
        file.write_text(f"dim: {dim}\n")
        os.utime(file, (1, 1))
        monkeypatch.chdir(tmp_path / name)
        assert hydra_config(["model=mine", "hydra.searchpath=[c]"]).model.dim == dim


def test_a_file_that_changes_is_parsed_again_and_nobody_gets_another_ones_values(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    file = tmp_path / "model" / "mine.yaml"
    words = ["model=mine", f"hydra.searchpath=[file://{tmp_path}]"]
    for dim in (8, 16):
        file.write_text(f"dim: {dim}\n")
        os.utime(file, ns=(dim, dim))
        first, second = hydra_config(words), hydra_config(words)
        first.model.dim = 1
        assert second.model.dim == dim == hydra_config(words).model.dim


def configs(folder: Path, pattern: str = "*") -> list[Any]:
    return [OmegaConf.to_container(OmegaConf.load(path)) for path in sorted(folder.glob(f"{pattern}/config.yaml"))]
