"""`dtrain watch` follows a run on a real SLURM: from the queue to its end, through the files of its folder."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path

import pytest

from tests import slurm
from tests.slurm import Cluster
from tests.slurm_runs import NODES_2, here, job_id, submit, until_step
from tests.terminals import Tmux, tmux

cluster = slurm.cluster
__all__ = ["here", "tmux"]


@pytest.mark.slow
def test_from_the_queue_to_the_end(cluster: Cluster, here: Path, tmux: Tmux) -> None:
    partition = cluster.run("sinfo", "-h", "-o", "%R").stdout.split()[0]
    cluster.run("scontrol", "update", f"PartitionName={partition}", "State=DOWN")
    try:
        run = submit(*NODES_2, "train.steps=100000", "train.log_every=1", "checkpoint.every=50")
        tmux.open(80, 24)
        tmux.type(f"export SLURM_CONF={shlex.quote(cluster.env['SLURM_CONF'])}", "Enter")
        tmux.type(f"{shlex.quote(sys.executable)} -m dtrain watch {run}", "Enter")
        tmux.until("queued (PartitionDown", f"{job_id(run)} PENDING", timeout=60)
    finally:
        cluster.run("scontrol", "update", f"PartitionName={partition}", "State=UP")
    until_step(run, 60)
    shown = tmux.until("running", "/100000", f"{job_id(run)} RUNNING", "node[1-2]", "own ", timeout=90)
    assert len(shown.splitlines()) == 24 and "q quit" in shown
    tmux.resize(200, 50)
    shown = tmux.until("loss, newest steps", "where a step goes", "saved", f"{job_id(run)} RUNNING", timeout=60)
    assert len(shown.splitlines()) == 50 and max(map(len, shown.splitlines())) <= 200
    tmux.run("send-keys", "q")
    tmux.type(f"{shlex.quote(sys.executable)} -m dtrain cancel {run}", "Enter")
    tmux.until("ready> ")
    tmux.type(f"clear; {shlex.quote(sys.executable)} -m dtrain watch {run}", "Enter")
    tmux.until("cancelled (by dtrain cancel)", "steps 1 to", timeout=120)
