"""Runs on a real Ray cluster whose nodes are processes of this machine, for tests and benchmarks."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil

from dtrain.runs.record import Record
from tests.launch.test_local import listen_to_signals
from tests.patience import patience, until
from tests.world import ROOT, SMALL, metrics

ON_TWO = ["cluster=ray", "cluster.nodes=2", "cluster.processes=1", "train.steps=30", "checkpoint.every=5"]


@contextmanager
def two_nodes(**head: Any) -> Iterator[Any]:
    """A head without room for ranks, and two nodes with room for one rank each."""
    from ray.cluster_utils import Cluster

    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": False} | head)
    try:
        for _ in range(2):
            cluster.add_node(num_cpus=1)
        cluster.wait_for_nodes()
        yield cluster
    finally:
        cluster.shutdown()


def launch(cwd: Path, *words: str) -> subprocess.Popen[str]:
    return start(cwd, str(ROOT / "launch.py"), *SMALL, *words)


def start(cwd: Path, *argv: str, **environment: str) -> subprocess.Popen[str]:
    """Start a Python program as from a terminal."""
    environment = {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)} | environment
    return subprocess.Popen(
        [sys.executable, *argv], cwd=cwd, env=os.environ | environment,
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


def actors() -> list[psutil.Process]:
    """The processes of all ranks' actors on this machine."""
    return [process for process in psutil.process_iter(["name"]) if process.info["name"].startswith("ray::Rank")]


def until_step(run: Path, step: int) -> None:
    until(lambda: (lines := metrics(run)) and lines[-1]["step"] >= step, f"step {step} of {run}", 120)


def attempts(run: Path) -> list[dict[str, Any]]:
    return Record.read(run).attempts
