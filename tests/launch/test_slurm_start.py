"""A job that was submitted beside a queue.py: its supervisor, agents and ranks import Python's own."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests import slurm
from tests.launch import shadows
from tests.slurm_runs import NODES_1, here, said, submit, until
from tests.world import summary

cluster = slurm.cluster
__all__ = ["here"]


def test_a_job_beside_such_files(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shadows.write(here)
    monkeypatch.setattr(sys, "path", [*sys.path, str(here)])
    run = submit(*NODES_1, *shadows.OVERRIDES, "train.steps=2", "cluster.processes=1", "preflight=quick")
    until(lambda: summary(run).get("status") in ("done", "failed") if (run / "summary.json").exists() else 0, said(run))
    assert summary(run)["status"] == "done", said(run)
