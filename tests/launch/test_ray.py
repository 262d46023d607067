"""`cluster=ray` on a real Ray cluster of two nodes: the same bits as local ranks; kills of actors and nodes; cancel."""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.launch.test_local import listen_to_signals
from tests.patience import patience, until
from tests.world import ROOT, SMALL, losses, metrics, summary

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not importlib.util.find_spec("ray"), reason="needs pip install 'dtrain[ray]'"),
]
ON_TWO = ["cluster=ray", "cluster.nodes=2", "cluster.processes=1", "train.steps=30", "checkpoint.every=5"]


@pytest.fixture(scope="module")
def ray_cluster() -> Iterator[Any]:
    """A head without room for ranks, and two nodes with room for one rank each."""
    from ray.cluster_utils import Cluster

    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": False})
    for _ in range(2):
        cluster.add_node(num_cpus=1)
    cluster.wait_for_nodes()
    yield cluster
    cluster.shutdown()


def launch(cwd: Path, *words: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, str(ROOT / "launch.py"), *SMALL, *words], cwd=cwd, env=os.environ | {"OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, preexec_fn=listen_to_signals,
    )  # fmt: skip


def finish(process: subprocess.Popen[str], code: int = 0) -> str:
    output, _ = process.communicate(timeout=patience(150))
    assert process.returncode == code, output
    return output


def ranks_of(run: Path) -> list[psutil.Process]:
    found = []
    for process in psutil.process_iter(["cmdline"]):
        words = process.info["cmdline"] or []
        if "dtrain.train.rank" in words and str(run) in words:
            found.append(process)
    return sorted(found, key=lambda p: int(p.environ()["RANK"]))


def until_step(run: Path, step: int) -> None:
    until(lambda: (lines := metrics(run)) and lines[-1]["step"] >= step, f"step {step} of {run}", 120)


def test_it_computes_what_local_ranks_do(ray_cluster: Any, tmp_path: Path) -> None:
    finish(launch(tmp_path, "cluster.processes=2", *ON_TWO[3:], "run_dir=local"))
    finish(launch(tmp_path, *ON_TWO, f"cluster.address={ray_cluster.address}", "run_dir=ray"))
    local, on_ray = tmp_path / "local", tmp_path / "ray"
    assert summary(on_ray)["weights_sha256"] == summary(local)["weights_sha256"]
    assert losses(on_ray) == losses(local)
    starts = [json.loads(line) for line in (on_ray / "attempts.jsonl").read_text().splitlines()]
    assert [line["event"] for line in starts] == ["start", "end"]


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


def attempts(run: Path) -> list[dict[str, Any]]:
    path = run / "attempts.jsonl"
    lines = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    return [line for line in lines if line["event"] == "start"]


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
    until(lambda: not ranks_of(run), "all ranks gone", 20)
    deadline = time.monotonic() + patience(20)
    while time.monotonic() < deadline and any(p.name().startswith("ray::Rank") for p in psutil.process_iter()):
        time.sleep(0.2)
    assert not any(p.name().startswith("ray::Rank") for p in psutil.process_iter())


def test_too_many_ranks_are_refused_before_anything_is_written(ray_cluster: Any, tmp_path: Path) -> None:
    words = [*ON_TWO, f"cluster.address={ray_cluster.address}", "cluster.nodes=3", "train.global_batch_size=6"]
    output = finish(launch(tmp_path, *words, "run_dir=run"), 2)
    assert "cluster.nodes=3: only 2 of the 3 nodes" in output and not (tmp_path / "run").exists()
    output = finish(launch(tmp_path, *ON_TWO, "run_dir=run"), 2)
    assert "Ray is started on this machine, which is one node" in output
