"""Launches in this process that end at the launcher: the run folder is written, and no rank starts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from omegaconf import OmegaConf

from dtrain.cli import main
from dtrain.launch.local import Local
from tests.test_bad_inputs import COMPOSE_ONCE


@pytest.fixture(autouse=True)
def started(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """Work in an empty folder; the run folders that were handed to the launcher."""
    folders: list[Path] = []
    monkeypatch.setattr(*COMPOSE_ONCE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.delenv("HYDRA_FULL_ERROR", raising=False)
    monkeypatch.setattr(Local, "launch", lambda self, run_dir: folders.append(run_dir) or 0)
    return folders


def read(run_dir: Path) -> dict[str, Any]:
    config = OmegaConf.to_container(OmegaConf.load(run_dir / "config.yaml"))
    assert isinstance(config, dict)
    return config  # type: ignore[return-value]


def run(*arguments: str) -> None:
    assert main(["launch", *arguments]) == 0


def refused(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert main(["launch", *arguments]) == 2
    return capsys.readouterr().err
