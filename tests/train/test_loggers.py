"""Loggers get what metrics.jsonl gets."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.world import make_run, train


def test_wandb_writes_an_offline_run(tmp_path: Path) -> None:
    pytest.importorskip("wandb")
    run = make_run(tmp_path / "run", "logger=wandb", "logger.mode=offline", "cluster.processes=1", "train.steps=3")
    assert train(run, 1, env={"WANDB_SILENT": "true"}) == [0]
    (offline,) = (run / "wandb").glob("offline-run-*")
    (file,) = offline.glob("*.wandb")
    content = file.read_bytes()
    assert b"grad_norm" in content and b"weights_sha256" in content
