"""`cluster=ray` on a real Ray cluster of two nodes: the same bits as local ranks; kills of actors and nodes; cancel."""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from dtrain.runs.record import Record
from tests.patience import until
from tests.ray_runs import ON_TWO, actors, attempts, finish, launch, ranks_of, start, two_nodes, until_step
from tests.world import ROOT, losses, metrics, summary

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not importlib.util.find_spec("ray"), reason="needs pip install 'dtrain[ray]'"),
]


@pytest.fixture(scope="module")
def ray_cluster() -> Iterator[Any]:
    with two_nodes() as cluster:
        yield cluster


def test_it_computes_what_local_ranks_do(ray_cluster: Any, tmp_path: Path) -> None:
    finish(launch(tmp_path, "cluster.processes=2", *ON_TWO[3:], "run_dir=local"))
    finish(launch(tmp_path, *ON_TWO, f"cluster.address={ray_cluster.address}", "run_dir=ray"))
    local, on_ray = tmp_path / "local", tmp_path / "ray"
    assert summary(on_ray)["weights_sha256"] == summary(local)["weights_sha256"]
    assert losses(on_ray) == losses(local)
    (attempt,) = attempts(on_ray)
    assert attempt["nodes"] == [socket.gethostname()] * 2 and attempt["why"] == "done"


def test_killed_actors_and_nodes_lose_nothing_that_was_saved(ray_cluster: Any, tmp_path: Path) -> None:
    run = tmp_path / "run"
    words = [*ON_TWO, f"cluster.address={ray_cluster.address}", "cluster.max_restarts=2", "train.steps=120"]
    process = launch(tmp_path, *words, "run_dir=run")
    until_step(run, 12)
    actor = ranks_of(run)[1].parent()
    assert actor is not None and actor.name().startswith("ray::Rank")
    actor.send_signal(signal.SIGKILL)
    until(lambda: len(attempts(run)) == 2, "a restart", 60)
    before = metrics(run)[-1]["step"]
    until_step(run, before + 8)
    ray_cluster.remove_node(next(iter(ray_cluster.worker_nodes)), allow_graceful=False)
    ray_cluster.add_node(num_cpus=1)
    output = finish(process)
    assert "attempt 1 failed: rank 1: SIGKILL" in output and len(attempts(run)) == 3
    assert sorted(losses(run)) == list(range(1, 121))
    finish(launch(tmp_path, "cluster.processes=2", "checkpoint.every=5", "train.steps=120", "run_dir=local"))
    assert summary(run)["weights_sha256"] == summary(tmp_path / "local")["weights_sha256"]


def test_a_stop_saves_and_leaves_no_actor(ray_cluster: Any, tmp_path: Path) -> None:
    run = tmp_path / "run"
    words = [*ON_TWO, f"cluster.address={ray_cluster.address}", "train.steps=5000"]
    process = launch(tmp_path, *words, "run_dir=run")
    until_step(run, 7)
    command = [sys.executable, "-m", "dtrain", "cancel", "run"]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    stopped = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert stopped.returncode == 0, stopped.stdout + stopped.stderr
    finish(process, 75)
    assert summary(run)["status"] == "preempted"
    until(lambda: not ranks_of(run) and not actors(), "all ranks and actors gone", 20)


def test_a_stop_while_ray_has_no_room_ends_at_once(ray_cluster: Any, tmp_path: Path) -> None:
    address = f"cluster.address={ray_cluster.address}"
    first = launch(tmp_path, *ON_TWO, address, "train.steps=5000", "run_dir=first")
    until_step(tmp_path / "first", 1)
    second = launch(tmp_path, *ON_TWO, address, "run_dir=second")
    until(lambda: attempts(tmp_path / "second"), "an attempt", 60)
    second.send_signal(signal.SIGTERM)
    output = finish(second, 75)
    assert "stop requested: no rank had started" in output
    assert Record.read(tmp_path / "second").status == "preempted" and not ranks_of(tmp_path / "second")
    first.send_signal(signal.SIGTERM)
    finish(first, 75)
    finish(start(tmp_path, str(ROOT / "launch.py"), "resume=second"))  # there is room now
    assert summary(tmp_path / "second")["status"] == "done"


# as in a Ray job, which sets RAY_ADDRESS; then in a driver that has connected; then in a task, over the same connection
FIT = """
import json, os, sys
import dtrain, ray

def fit(run_dir):
    settings = json.loads(sys.argv[1])
    settings["model"] = tuple(settings["model"])
    return dtrain.fit(**settings, cluster=("ray", {"nodes": 2, "processes": 1}), run_dir=run_dir).status

@ray.remote(num_cpus=0)
def task(argv, folder):
    sys.argv = argv
    return fit(folder + "/task")

if __name__ == "__main__":
    print("job", fit("job"), ray.is_initialized())
    ray.init(log_to_driver=False)
    print("driver", fit("driver"), ray.is_initialized())
    print("task", ray.get(task.remote(sys.argv, os.getcwd())))
"""


def test_fit_inside_of_ray(ray_cluster: Any, tmp_path: Path) -> None:
    (tmp_path / "fit.py").write_text(FIT)
    sizes = {"num_layers": 2, "dim": 16, "num_heads": 2, "seq_len": 16}
    settings = {"model": ["gpt2-tiny", sizes], "data": "synthetic", "train": {"steps": 4, "global_batch_size": 8}}
    output = finish(start(tmp_path, "fit.py", json.dumps(settings), RAY_ADDRESS=ray_cluster.address))
    assert "job done False" in output and "driver done True" in output and "task done" in output
    hashes = {summary(tmp_path / name)["weights_sha256"] for name in ("job", "driver", "task")}
    assert len(hashes) == 1 and len(attempts(tmp_path / "task")[0]["nodes"]) == 2


def test_too_many_ranks_are_refused_before_anything_is_written(ray_cluster: Any, tmp_path: Path) -> None:
    words = [*ON_TWO, f"cluster.address={ray_cluster.address}", "cluster.nodes=3", "train.global_batch_size=6"]
    output = finish(launch(tmp_path, *words, "run_dir=run"), 2)
    assert "cluster.nodes=3: only 2 of the 3 nodes" in output and not (tmp_path / "run").exists()
    assert "cluster.autoscaling=true" in output
    output = finish(launch(tmp_path, *ON_TWO, "run_dir=run"), 2)
    assert "Ray is started on this machine, which is one node" in output


def test_nodes_that_an_autoscaler_would_add_are_waited_for(ray_cluster: Any, tmp_path: Path) -> None:
    words = ["cluster.nodes=3", "train.global_batch_size=6", "train.steps=4", "cluster.autoscaling=true"]
    process = launch(tmp_path, *ON_TWO, f"cluster.address={ray_cluster.address}", *words, "run_dir=run")
    until(lambda: attempts(tmp_path / "run"), "an attempt", 60)
    node = ray_cluster.add_node(num_cpus=1)
    finish(process)
    ray_cluster.remove_node(node)
    assert len(attempts(tmp_path / "run")[0]["nodes"]) == 3
