"""cluster.metrics_port: a real run serves its metrics while it trains, and no trouble with that touches the run."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import urllib.request
from pathlib import Path

import pytest

from dtrain.launch import metrics_server
from dtrain.runs.metrics import rows, system_files
from dtrain.runs.protocol import free_port
from dtrain.runs.system import is_installed
from tests.patience import patience, until
from tests.world import ROOT, SMALL, summary

pytest.importorskip("prometheus_client")


def scrape(port: int) -> str:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=5) as answer:
            return str(answer.read().decode())
    except OSError:
        return ""


def launch(run: Path, *overrides: str) -> subprocess.Popen[str]:
    command = [sys.executable, str(ROOT / "launch.py"), *SMALL, f"run_dir={run}", *overrides]
    env = os.environ | {"OMP_NUM_THREADS": "1"}
    return subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def test_a_run_is_scraped_while_it_trains(tmp_path: Path) -> None:
    """Its own server, the sampler of its node, and a second server whose port was taken after the check."""
    port, run = free_port(), tmp_path / "run"
    process = launch(run, f"cluster.metrics_port={port}", "cluster.system_metrics_every=0.5", "train.steps=100000")
    try:
        wanted = 'dtrain_step{run="run",strategy="ddp"}'
        until(lambda: wanted in scrape(port), "a step at /metrics", 60, lambda: str(process.poll()))
        if is_installed():
            until(lambda: "dtrain_node_cpu_ratio{" in scrape(port), "system metrics")
        assert 'dtrain_running{run="run",strategy="ddp"} 1.0' in scrape(port)
        with pytest.raises(ValueError, match=rf"cluster.metrics_port={port}: .*cannot be bound \(Address already in"):
            metrics_server.check({"metrics_port": port})
        said: list[str] = []
        (tmp_path / "logs").mkdir()
        second = metrics_server.MetricsServer(tmp_path, {"metrics_port": port})
        until(lambda: second.poll(said.append) or said, "the second server's end")
        assert len(said) == 1 and "Address already in use" in said[0], said
    finally:
        process.terminate()
        output, _ = process.communicate(timeout=patience(60))
    assert process.returncode == 75, output
    assert summary(run)["status"] == "preempted" and not scrape(port)
    metrics_server.check({"metrics_port": port})  # free again
    assert not is_installed() or len(rows(next(iter(system_files(run).values())))) > 1


def test_refusals() -> None:
    metrics_server.check({})  # of a run from before these settings
    metrics_server.check({"metrics_port": None, "metrics_host": "no.such.host.invalid"})
    with pytest.raises(ValueError, match=r"cluster.metrics_host=no.such.host.invalid: .*\n  fix: "):
        metrics_server.check({"metrics_port": 9, "metrics_host": "no.such.host.invalid"})
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        with pytest.raises(ValueError, match=f"cluster.metrics_port={port}: 127.0.0.1:{port} cannot be bound"):
            metrics_server.check({"metrics_port": port, "metrics_host": "127.0.0.1"})
