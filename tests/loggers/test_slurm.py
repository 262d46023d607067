"""On SLURM the follower runs in the batch job, and a requeued job continues."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests import slurm, slurm_runs
from tests.loggers import read_back
from tests.slurm import Cluster
from tests.slurm_runs import NODES_1, attempts, job_id, submit, until, until_step
from tests.world import summary

cluster, here = slurm.cluster, slurm_runs.here


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_requeued_job_continues_in_the_tracker(cluster: Cluster, here: Path) -> None:
    pytest.importorskip("tensorboard")
    run = submit(*NODES_1, "logger=[csv,tensorboard]", "train.steps=40", "checkpoint.every=5")
    until_step(run, 6)
    cluster.run("scontrol", "requeue", job_id(run))
    until(lambda: summary(run).get("status") == "done", "the end")
    until(lambda: len(attempts(run, "end")) >= 1 and (run / "logs" / "trackers.json").exists(), "the follower's end")
    truth = read_back.truth(run)
    assert [step for step, _ in truth["loss"]] == list(range(1, 41))
    assert read_back.of_csv(run)["loss"] == truth["loss"]
    assert [step for step, _ in read_back.of_tensorboard(run)["loss"]] == list(range(1, 41))
