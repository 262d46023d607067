"""`script=FILE` on a real SLURM: a torchrun program that knows nothing of dtrain, on two nodes, through a requeue."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.slurm import Cluster
from tests.slurm import cluster as cluster
from tests.slurm_runs import attempts, failure, job_id, said, submit, until
from tests.slurm_runs import here as here
from tests.world import summary

# a torchrun program: it counts, saves where its argument says, and goes on from there
PROGRAM = """
import os, pathlib, sys, time
import torch
import torch.distributed as dist

dist.init_process_group("gloo")
path = pathlib.Path(sys.argv[1])
count = torch.tensor([int(path.read_text()) if path.exists() else 0])
dist.broadcast(count, 0)
print("begins at", count.item(), "on", os.environ["SLURMD_NODENAME"], flush=True)
while count < 40:
    one = torch.ones(1)
    dist.all_reduce(one)
    assert one.item() == int(os.environ["WORLD_SIZE"])
    count += 1
    if dist.get_rank() == 0:
        path.write_text(str(count.item()))
    if len(sys.argv) > 2 and dist.get_rank() == 1 and count == 3:
        raise ConnectionError("the camera is gone")
    time.sleep(0.2)
dist.barrier()
"""
NODES = ["script=count.py", "cluster=slurm", "cluster.gpus_per_node=0", "cluster.nodes=2", "cluster.processes=1"]
NODES += ["preflight=off"]


@pytest.mark.slow
def test_two_nodes_a_requeue_and_a_failure(cluster: Cluster, here: Path) -> None:
    (here / "count.py").write_text(PROGRAM)
    run = submit(*NODES, f"script_args=[{here}/count.txt]")
    until(lambda: (here / "count.txt").exists() and int((here / "count.txt").read_text() or 0) > 3, "some steps")
    cluster.run("scontrol", "requeue", job_id(run))
    assert cluster.wait(job_id(run), timeout=300, restarts=1) == "COMPLETED", said(run)
    assert summary(run)["status"] == "done" and (here / "count.txt").read_text() == "40"
    begins = [line for line in (run / "logs/rank-1.log").read_text().splitlines() if line.startswith("begins at")]
    assert len(begins) == 2 and begins[0].startswith("begins at 0 ") and not begins[1].startswith("begins at 0 ")
    assert len(attempts(run, "start")) == 2 and len(attempts(run, "start")[0]["nodes"]) == 2

    run = submit(*NODES, f"script_args=[{here}/other.txt,fail]", run="failing")
    assert cluster.wait(job_id(run), timeout=300) == "FAILED", said(run)
    found = failure(run)
    assert (found["rank"], found["type"], found["message"]) == (1, "ConnectionError", "the camera is gone")
    assert found["where"].startswith(f"{here}/count.py:") and len(attempts(run, "start")) == 1
