"""`cluster=kubernetes` on a stand-in for a cluster (tests/kubernetes.py): pods as processes, the official client."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.kubernetes import Cluster
from tests.patience import patience, until
from tests.world import ROOT, SMALL, losses, metrics, summary

needs_client = pytest.mark.skipif(
    not importlib.util.find_spec("kubernetes"), reason="needs pip install 'dtrain[kubernetes]'"
)
STEPS = ["train.steps=12", "checkpoint.every=4"]


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    with Cluster(tmp_path / "cluster") as made:
        yield made


def dtrain(cluster: Cluster | None, cwd: Path, *words: str, code: int = 0) -> str:
    """Run a command of dtrain where the cluster can be reached."""
    env = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    env |= {"KUBECONFIG": str(cluster.kubeconfig)} if cluster else {}
    done = subprocess.run(
        [sys.executable, "-m", "dtrain", *words],
        cwd=cwd,
        env=env,
        capture_output=True,
        text=True,
        timeout=patience(120),
    )
    assert done.returncode == code, done.stdout + done.stderr
    return done.stdout + done.stderr


def submit(cluster: Cluster, tmp_path: Path, *words: str, code: int = 0) -> str:
    """Two pods with one rank each; the volume is tmp_path/volume, which this machine mounts, too."""
    place = ["cluster=kubernetes", "cluster.image=dtrain", f"cluster.volumes=[training:{tmp_path}/volume]"]
    return dtrain(cluster, tmp_path, "launch", *SMALL, *place, "cluster.nodes=2", "preflight=off", *words, code=code)


def ended(cluster: Cluster) -> str:
    """Wait until the job has ended; return how."""
    (controller,) = cluster.controllers()
    until(lambda: controller.conditions, "the end of the job", 150, lambda: shown(cluster))
    return str(controller.conditions[0]["type"])


def shown(cluster: Cluster) -> str:
    return "\n".join(
        f"{p.name} {p.phase} {p.codes}\n{log.read_text()}" for p in cluster.pods() for log in p.logs.values()
    )


def until_step(run: Path, step: int, cluster: Cluster) -> None:
    until(lambda: (run / "metrics.jsonl").exists() and (lines := metrics(run)) and lines[-1]["step"] >= step,
          f"step {step}", 120, lambda: shown(cluster))  # fmt: skip


@needs_client
def test_two_pods_compute_what_local_ranks_do(cluster: Cluster, tmp_path: Path) -> None:
    run = tmp_path / "volume" / "run"
    output = submit(cluster, tmp_path, *STEPS, f"run_dir={run}")
    assert "submitted job/lab/gpt2-tiny-ddp-" in output and "2 pods × 1 rank" in output
    assert ended(cluster) == "Complete", shown(cluster)
    dtrain(None, tmp_path, "launch", *SMALL, *STEPS, "cluster.processes=2", "run_dir=local")
    assert summary(run)["weights_sha256"] == summary(tmp_path / "local")["weights_sha256"]
    assert losses(run) == losses(tmp_path / "local")
    found = json.loads(dtrain(cluster, tmp_path, "status", str(run), "--json"))
    assert (found["status"], found["steps"]) == ("done", 12)
    assert "nothing to cancel" in dtrain(cluster, tmp_path, "cancel", str(run))


@needs_client
@pytest.mark.slow
@pytest.mark.parametrize("kind", ["job", "jobset", "pytorchjob", "trainjob"])
def test_a_stopped_pod_is_started_again_and_resumes(kind: str, cluster: Cluster, tmp_path: Path) -> None:
    run = tmp_path / "volume" / "run"
    submit(cluster, tmp_path, "train.steps=60", "checkpoint.every=4", f"run_dir={run}", f"cluster.kind={kind}")
    until_step(run, 6, cluster)
    cluster.pods()[1].stop()  # as the machine of the second pod is drained
    assert ended(cluster) != "Failed", shown(cluster)
    stopped = {138} if kind == "pytorchjob" else {75}
    assert {p.code for p in cluster.pods()} == stopped | {0} and len(cluster.pods()) == 4
    assert sorted(losses(run)) == list(range(1, 61))
    starts = [json.loads(line) for line in (run / "attempts.jsonl").read_text().splitlines()]
    assert [line["event"] for line in starts] == ["start", "end"] * 2 and starts[2]["step"] >= 6
    dtrain(
        None, tmp_path, "launch", *SMALL, "train.steps=60", "checkpoint.every=4", "cluster.processes=2", "run_dir=local"
    )
    assert summary(run)["weights_sha256"] == summary(tmp_path / "local")["weights_sha256"]


@needs_client
@pytest.mark.slow
@pytest.mark.parametrize("kind", ["job", "jobset"])
def test_a_killed_rank_is_restarted_as_often_as_allowed(kind: str, cluster: Cluster, tmp_path: Path) -> None:
    run = tmp_path / "volume" / "run"
    words = ["train.steps=60", "checkpoint.every=4", f"run_dir={run}", f"cluster.kind={kind}", "cluster.max_restarts=1"]
    submit(cluster, tmp_path, *words)
    until_step(run, 6, cluster)
    position = json.loads((run / "logs" / "position-1.json").read_text())
    os.kill(position["pid"], 9)
    assert ended(cluster) != "Failed", shown(cluster)
    assert {0, 3} < {p.code for p in cluster.pods()} <= {0, 3, 75, 143}  # 143: JobSet ended it while it was ending
    assert sorted(losses(run)) == list(range(1, 61))


@needs_client
@pytest.mark.parametrize(
    "kind", ["job", pytest.param("jobset", marks=pytest.mark.slow), pytest.param("pytorchjob", marks=pytest.mark.slow)]
)
def test_what_no_restart_mends_is_not_restarted(kind: str, cluster: Cluster, tmp_path: Path) -> None:
    """The data is missing in the pods: exit code 2. The volume is not mounted here: status and logs ask the API."""
    (tmp_path / "volume").mkdir()
    words = ["data=text", "data.path=/nowhere/at/all", f"cluster.run_root={tmp_path}/volume", "run_dir=here/it/is"]
    submit(cluster, tmp_path, *words, f"cluster.kind={kind}")
    assert ended(cluster) == "Failed" and len(cluster.pods()) == 2, shown(cluster)
    assert 2 in {p.code for p in cluster.pods()}
    found = json.loads(dtrain(cluster, tmp_path, "status", "here/it/is", "--json"))
    assert found["status"] == "failed" and found["job"]["exit"] == "2:0"
    assert "/nowhere/at/all" in dtrain(cluster, tmp_path, "logs", "here/it/is")


@needs_client
@pytest.mark.slow
def test_a_node_that_fails_preflight_ends_the_job(cluster: Cluster, tmp_path: Path) -> None:
    run = tmp_path / "volume" / "run"
    submit(cluster, tmp_path, f"run_dir={run}", "preflight=quick", "preflight.min_shm_gib=1000000")
    assert ended(cluster) == "Failed" and len(cluster.pods()) == 2 and 4 in {p.code for p in cluster.pods()}
    assert "/dev/shm" in dtrain(cluster, tmp_path, "status", str(run))


@needs_client
@pytest.mark.slow
def test_a_volume_that_is_not_mounted_here(cluster: Cluster, tmp_path: Path) -> None:
    """The run folder is elsewhere: start, status, logs, cancel with a save, and a resume in the same folder."""
    words = ["checkpoint.every=4", f"cluster.run_root={tmp_path}/volume", "preflight=quick", "preflight.min_shm_gib=0"]
    submit(cluster, tmp_path, "train.steps=3000", *words, "run_dir=a/b/c")
    there = tmp_path / "volume" / "a" / "b" / "c"
    until_step(there, 6, cluster)
    assert json.loads(dtrain(cluster, tmp_path, "status", "a/b/c", "--json"))["status"] == "running"
    assert "job/lab/" in dtrain(cluster, tmp_path, "status", "a/b/c")
    assert "starting 1 rank" in dtrain(cluster, tmp_path, "logs", "a/b/c", "-n", "all")
    assert "its job" in dtrain(cluster, tmp_path, "launch", "resume=a/b/c", code=2)
    dtrain(cluster, tmp_path, "cancel", "a/b/c")
    until(lambda: {p.code for p in cluster.pods()} == {75}, "the end of the pods", 60, lambda: shown(cluster))
    assert summary(there)["status"] == "preempted" and not any(key[0] == "jobs" for key in cluster.objects)
    assert json.loads(dtrain(cluster, tmp_path, "status", "a/b/c", "--json"))["status"] == "cancelled"
    step = summary(there)["steps"]
    typed = ["cluster.image=dtrain", f"cluster.volumes=[training:{tmp_path}/volume]"]
    more = [f"train.steps={step + 4}", "resume_allow=[train.steps]"]
    dtrain(cluster, tmp_path, "launch", "resume=a/b/c", *typed, *more)
    until(lambda: summary(there)["status"] == "done", "the end of the run", 120, lambda: shown(cluster))
    assert summary(there)["steps"] == step + 4
    until(lambda: json.loads(dtrain(cluster, tmp_path, "status", "a/b/c", "--json"))["status"] == "done", "status done")


@needs_client
@pytest.mark.slow
def test_a_sweep_is_a_job_for_each_point(cluster: Cluster, tmp_path: Path) -> None:
    words = ["-m", "optim.lr=1e-3,3e-3", f"hydra.sweep.dir={tmp_path}/volume/sweep", "train.steps=2", "cluster.nodes=1"]
    assert "submitted 2 jobs" in submit(cluster, tmp_path, *words)
    until(lambda: all(c.conditions for c in cluster.controllers()), "both jobs", 120, lambda: shown(cluster))
    assert [c.conditions[0]["type"] for c in cluster.controllers()] == ["Complete"] * 2, shown(cluster)


@needs_client
def test_what_the_server_refuses_is_refused_before_anything_is_written(cluster: Cluster, tmp_path: Path) -> None:
    words = [f"run_dir={tmp_path}/volume/run", "cluster.pod={noSuchField: 1}"]
    output = submit(cluster, tmp_path, *words, code=2)
    assert "Kubernetes refuses the job" in output and "noSuchField" in output
    assert not (tmp_path / "volume").exists() and not cluster.objects


def test_without_the_client_it_can_be_previewed(tmp_path: Path) -> None:
    (tmp_path / "kubernetes").mkdir()
    (tmp_path / "kubernetes" / "__init__.py").write_text("raise ImportError")
    words = ["cluster=kubernetes", "cluster.image=x", "cluster.volumes=[a:/data]", "cluster.run_root=/data"]
    env = os.environ | {"PYTHONPATH": f"{tmp_path}:{ROOT}"}

    def launch(*more: str) -> Any:
        command = [sys.executable, "-m", "dtrain", "launch", *words, *more]
        return subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=patience(60))

    assert "kind: Job" in launch("--dry-run").stdout
    refused = launch()
    assert refused.returncode == 2 and "pip install 'dtrain[kubernetes]'" in refused.stderr
    assert not (tmp_path / "outputs").exists()
