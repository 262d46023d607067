"""A command is composed once, a sweep once and once more for each of its jobs; what comes out is as Hydra has it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra._internal.core_plugins.file_config_source import FileConfigSource
from omegaconf import OmegaConf

from dtrain.cli import main
from dtrain.launch.local import Local


@pytest.fixture
def counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What happened: each composition, and each file of conf/ that was read. Nothing is trained."""
    events: list[str] = []

    def count(owner: Any, name: str, event: str) -> None:
        original = getattr(owner, name)

        def counting(self: Any, *args: Any, **kwargs: Any) -> Any:
            events.append(event)
            return original(self, *args, **kwargs)

        monkeypatch.setattr(owner, name, counting)

    count(ConfigLoaderImpl, "load_configuration", "composed")
    count(FileConfigSource, "load_config", "read")
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
    # for the sweep itself, and for all of its jobs together: conf/ has some 15 files that such a job needs
    assert counted.count("read") < 40, "each job reads conf/ anew"
    found = {(config["train"]["seed"], config["choices"]["model"]) for config in configs(tmp_path / "sweep")}
    assert found == {(seed, model) for seed in (1, 3) for model in ("gpt2-tiny", "llama-tiny")}

    # beside each job, the same as a command of its own
    assert main(["launch", "train.seed=3", "model=llama-tiny", "run_dir=alone"]) == 0
    [alone], jobs = configs(tmp_path, "alone"), configs(tmp_path / "sweep")
    [job] = [c for c in jobs if (c["train"]["seed"], c["choices"]["model"]) == (3, "llama-tiny")]
    assert {k: v for k, v in job.items() if k != "run_dir"} == {k: v for k, v in alone.items() if k != "run_dir"}


def configs(folder: Path, pattern: str = "*") -> list[Any]:
    return [OmegaConf.to_container(OmegaConf.load(path)) for path in sorted(folder.glob(f"{pattern}/config.yaml"))]
