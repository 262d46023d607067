"""`script=FILE` on a real SLURM: programs that know nothing of dtrain, on two nodes, through a requeue."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.slurm import Cluster
from tests.slurm import cluster as cluster
from tests.slurm_runs import attempts, failure, job_id, said, submit, until
from tests.slurm_runs import here as here
from tests.world import summary

# a program of each world: it counts, saves where its argument says, and goes on from there
TORCHRUN = """
import os, pathlib, sys, time
import torch
import torch.distributed as dist

dist.init_process_group("gloo")
rank, size = dist.get_rank(), int(os.environ["WORLD_SIZE"])
sum_up = dist.all_reduce
"""
HOROVOD = """
import os, pathlib, sys, time
import horovod.torch as hvd
import torch

hvd.init()
rank, size = hvd.rank(), hvd.size()
assert (hvd.local_size(), hvd.cross_size()) == (1, 2)
sum_up = lambda value: hvd.allreduce_(value, op=hvd.Sum)
"""
TENSORFLOW = """
import os, pathlib, sys, time
import tensorflow as tf
import torch

strategy = tf.distribute.MultiWorkerMirroredStrategy()
rank, size = strategy.cluster_resolver.task_id, strategy.num_replicas_in_sync


@tf.function
def total(values):
    # identity: a value without a device cannot be reduced
    return strategy.run(lambda: tf.distribute.get_replica_context().all_reduce("SUM", tf.identity(values)))


sum_up = lambda value: value.copy_(torch.from_numpy(total(tf.constant(value.numpy())).numpy()))
"""
COUNTS = """
path = pathlib.Path(sys.argv[1])
count = torch.tensor([int(path.read_text()) if path.exists() and rank == 0 else 0])
sum_up(count)
print("begins at", count.item(), "on", os.environ["SLURMD_NODENAME"], flush=True)
one = torch.ones(1)
while count < 40:
    one.fill_(1)
    sum_up(one)
    assert one.item() == size == 2
    count += 1
    if rank == 0:
        path.write_text(str(count.item()))
    if len(sys.argv) > 2 and rank == 1 and count == 3:
        raise ConnectionError("the camera is gone")
    time.sleep(0.2)
sum_up(one)
"""
needs_tensorflow = pytest.mark.skipif(not find_spec("tensorflow"), reason="needs pip install 'dtrain[tensorflow]'")
needs_horovod = pytest.mark.skipif(not find_spec("horovod"), reason="Horovod is not built: make horovod")
NODES = ["script=count.py", "cluster=slurm", "cluster.gpus_per_node=0", "cluster.nodes=2", "cluster.processes=1"]
NODES += ["preflight=off"]


@pytest.mark.timeout(600)  # TensorFlow needs half a minute to start on two loaded cores, four times
@pytest.mark.slow
@pytest.mark.parametrize(
    "env, program",
    [
        pytest.param("torchrun", TORCHRUN, id="torchrun"),
        pytest.param("horovod", HOROVOD, id="horovod", marks=needs_horovod),
        pytest.param("tensorflow", TENSORFLOW, id="tensorflow", marks=needs_tensorflow),
    ],
)
def test_two_nodes_a_requeue_and_a_failure(env: str, program: str, cluster: Cluster, here: Path) -> None:
    (here / "count.py").write_text(program + COUNTS)
    nodes = [*NODES, f"script.env={env}", *(["script.stop_signal=INT"] if env == "tensorflow" else [])]
    run = submit(*nodes, f"script_args=[{here}/count.txt]")
    until(lambda: (here / "count.txt").exists() and int((here / "count.txt").read_text() or 0) > 3, "some steps")
    cluster.run("scontrol", "requeue", job_id(run))
    assert cluster.wait(job_id(run), timeout=300, restarts=1) == "COMPLETED", said(run)
    assert summary(run)["status"] == "done" and (here / "count.txt").read_text() == "40"
    begins = [line for line in (run / "logs/rank-1.log").read_text().splitlines() if line.startswith("begins at")]
    assert len(begins) == 2 and begins[0].startswith("begins at 0 ") and not begins[1].startswith("begins at 0 ")
    assert len(attempts(run, "start")) == 2 and len(attempts(run, "start")[0]["nodes"]) == 2

    run = submit(*nodes, f"script_args=[{here}/other.txt,fail]", run="failing")
    assert cluster.wait(job_id(run), timeout=300) == "FAILED", said(run)
    found = failure(run)
    assert (found["rank"], found["type"], found["message"]) == (1, "ConnectionError", "the camera is gone")
    assert found["where"].startswith(f"{here}/count.py:") and len(attempts(run, "start")) == 1
