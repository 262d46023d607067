"""Runs on the cluster of tests/slurm.py, as a user starts them and as a test looks at them."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from dtrain.cli import main
from tests import patience
from tests.slurm import Cluster
from tests.test_bad_inputs import COMPOSE_ONCE
from tests.world import SMALL, losses, metrics

NODES_2 = [*SMALL, "cluster=slurm", "cluster.gpus_per_node=0", "cluster.nodes=2", "preflight=off"]
NODES_1 = [*NODES_2, "cluster.nodes=1"]


@pytest.fixture
def here(cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An empty folder to type commands in, with the cluster in the environment. Jobs of the test end with it."""
    at_home(cluster, tmp_path, monkeypatch)
    yield tmp_path
    end_jobs(cluster, tmp_path)


def at_home(cluster: Cluster, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(*COMPOSE_ONCE)
    monkeypatch.chdir(folder)
    for name in [n for n in os.environ if n.startswith(("SLURM_", "SBATCH_", "SRUN_"))]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("SLURM_CONF", cluster.env["SLURM_CONF"])
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.delenv("HYDRA_FULL_ERROR", raising=False)


def end_jobs(cluster: Cluster, folder: Path) -> None:
    ids = [job_id(path.parent) for path in folder.rglob("launch.json") if "job_id" in path.read_text()]
    if ids:
        cluster.run("scancel", "--full", "--signal=KILL", *ids)
        cluster.run("scancel", *ids)


def submit(*overrides: str, run: str = "run") -> Path:
    """`dtrain launch` in this process, for speed; everything after it is SLURM's."""
    assert main(["launch", *overrides, f"run_dir={run}"]) == 0
    return Path(run).absolute()


def job_id(run: Path) -> str:
    return str(json.loads((run / "launch.json").read_text())["launches"][-1]["job_id"])


def until(true: Callable[[], object], what: str, timeout: float = 180) -> None:
    patience.until(true, what, timeout, state)


def state() -> str:
    """The queue of the cluster in the environment, and what supervisors and ranks of the runs here wrote last."""
    queue = subprocess.run(["squeue", "--all"], capture_output=True, text=True)
    return queue.stdout + queue.stderr + "".join(said(path.parent, 500) for path in Path().rglob("launch.json"))


def until_step(run: Path, step: int) -> None:
    until(lambda: (lines := metrics(run)) and lines[-1]["step"] >= step, f"step {step} of {run}")


def attempts(run: Path, event: str) -> list[dict[str, Any]]:
    """The starts, or the ends, that the supervisors noted."""
    path = run / "attempts.jsonl"
    lines = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    return [line for line in lines if line["event"] == event]


def exact(run: Path) -> dict[int, str]:
    """Every step's loss to the last bit."""
    return {step: loss.hex() for step, loss in losses(run).items()}


def failure(run: Path) -> dict[str, Any]:
    result: dict[str, Any] = json.loads((run / "failure.json").read_text())
    return result


def said(run: Path, most: int = 3000) -> str:
    """What the supervisor and the ranks wrote last, for the message of a failed test."""
    logs = sorted(run.glob("logs/*.log"))
    return "".join(f"--- {log}\n{log.read_text(errors='replace')[-most:]}\n" for log in logs)
