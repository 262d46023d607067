"""Strategies with an exchange of their own, on two nodes that reach each other over a network only."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests import slurm
from tests.slurm import Cluster
from tests.slurm_runs import NODES_2, here, job_id, said, submit
from tests.world import losses, make_run, train

cluster = slurm.cluster
__all__ = ["here"]


@pytest.mark.slow
@pytest.mark.parametrize(
    "words, tolerance", [(["strategy=ring"], 1e-5), (["strategy=diloco", "strategy.every=3"], 0.28)]
)
def test_trains_as_one_process(
    words: list[str], tolerance: float, here: Path, cluster: Cluster, tmp_path: Path
) -> None:
    run = submit(*NODES_2, *words, "train.steps=8")
    assert cluster.wait(job_id(run), timeout=120) == "COMPLETED", said(run)
    alone = make_run(tmp_path / "alone", "cluster.processes=1", "train.steps=8")
    assert train(alone, 1) == [0]
    ours, theirs = losses(run), losses(alone)
    assert len(ours) == 8 and max(abs(ours[s] - theirs[s]) for s in theirs) < tolerance
