"""System metrics and /metrics of a job on two nodes."""

from __future__ import annotations

from pathlib import Path

import pytest

from dtrain.cli import main
from dtrain.runs.metrics import rows, system_files
from dtrain.runs.protocol import free_port
from dtrain.runs.system import is_installed
from tests import slurm
from tests.launch.test_metrics_server import scrape
from tests.runs.test_system import sampler_of
from tests.slurm import Cluster
from tests.slurm_runs import NODES_2, here, job_id, said, submit, until, until_step

cluster = slurm.cluster
__all__ = ["here"]


@pytest.mark.slow
def test_each_node_is_sampled_and_the_job_is_scraped(here: Path, cluster: Cluster) -> None:
    if not is_installed():
        pytest.skip("no psutil here")
    port = free_port()
    settings = ("cluster.system_metrics_every=0.5", f"cluster.metrics_port={port}", "train.steps=1000000")
    run = submit(*NODES_2, *settings)
    until_step(run, 1)
    until(lambda: {*system_files(run)} == {"node1", "node2"}, "a file of each node")
    until(lambda: all(len(rows(path)) > 3 for path in system_files(run).values()), "some lines of each")
    assert len(sampler_of(run)) == 2
    # the tests' nodes share one network: the first one's localhost is this one
    until(lambda: 'dtrain_node_cpu_ratio{node="node2"' in scrape(port), "the second node at /metrics")
    assert main(["cancel", "--save", str(run)]) == 0
    cluster.wait(job_id(run), timeout=120)
    until(lambda: not sampler_of(run), "the end of both samplers", 30)
    assert not scrape(port), said(run)
