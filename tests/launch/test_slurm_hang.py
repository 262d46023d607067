"""A run on two nodes, of which one rank hangs: it is named across nodes."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests import slurm
from tests.launch.test_hang import HUNG
from tests.slurm import Cluster
from tests.slurm_runs import NODES_2, failure, here, job_id, said, submit

cluster = slurm.cluster
__all__ = ["here"]


# The tests' nodes share one kernel. So the supervisor sees in /proc that the second was stopped; the first prints its
# stack after a signal through SLURM, because its own thread cannot run.
@pytest.mark.parametrize(
    "how, message",
    [
        ("lock", "is in hung.py:7, in lock, which does not release Python's global lock"),
        ("stop", "was stopped by a signal or a debugger"),
    ],
    ids=["lock", "stop"],
)
def test_a_rank_of_another_node_that_hangs_is_named(
    here: Path, cluster: Cluster, how: str, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    (here / "hung.py").write_text(HUNG)
    for name, value in (("HOW", how), ("WHO", "1"), ("AT", "7")):
        monkeypatch.setenv(name, value)
    run = submit(*NODES_2, "model._target_=hung.Hung", "trust=[hung]", "cluster.hang_timeout=5", "train.steps=30")
    assert cluster.wait(job_id(run), timeout=120) == "FAILED", said(run)
    assert failure(run)["rank"] == 1 and f"rank 1 on node2 {message}" in failure(run)["message"], said(run)
    assert "1 of 2 ranks wait in all_reduce" in (run / "logs" / "batch.log").read_text()
