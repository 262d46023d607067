"""An elastic run on SLURM: ranks, nodes and the node of the supervisor are lost, and nodes join; with --all only."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from dtrain.cli import main
from dtrain.launch import slurm_guard
from tests import slurm
from tests.elastic import OVERRIDES, OWN, ElasticRun, apart, check_samples, generations, process_of
from tests.slurm_runs import at_home, attempts, end_jobs, job_id, said, submit, until, until_step
from tests.world import metrics

STEPS, EVERY = 600, 25


def test_a_batch_script_without_its_node_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slurm_guard, "ask", lambda *words: "node2\nnode3\n" if words[3] == "node[2-3]" else "")
    job = "JobState=RUNNING ReqNodeList=(null) ExcNodeList=(null)\n   NodeList=node[2-3]\n   BatchHost={}\n"
    assert slurm_guard.is_lost(job.format("node1"))
    assert not slurm_guard.is_lost(job.format("node2"))
    assert slurm_guard.is_lost(job.format("node2"), "node3"), "cancelled, though the job runs on"
    assert not slurm_guard.is_lost(job.format("node2"), "node1"), "given back by dtrain scale"
    assert not slurm_guard.is_lost(job.format("node1").replace("RUNNING", "PENDING"), "node3")
    assert not slurm_guard.is_lost("", "node3")


@pytest.mark.timeout(1500)  # SLURM itself takes a minute to notice a lost node
def test_ten_events_on_three_nodes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with slurm.temporary(slurm.available(), nodes=3) as cluster:
        at_home(cluster, tmp_path, monkeypatch)
        (tmp_path / "own.py").write_text(OWN)
        (tmp_path / "ids").mkdir()
        monkeypatch.setenv("IDS", str(tmp_path / "ids"))
        monkeypatch.setenv("PAUSE", "0")
        (tmp_path / "slow").touch()  # the run must not end before the last event
        run = submit(
            *OVERRIDES, "cluster=slurm", "cluster.gpus_per_node=0", "cluster.nodes=1:3", "preflight=off",
            f"train.steps={STEPS}", f"checkpoint.every={EVERY}",
        )  # fmt: skip

        def kill(rank: int) -> None:
            os.kill(process_of(run, rank), signal.SIGKILL)

        def leave(rank: int) -> None:
            os.kill(process_of(run, rank), signal.SIGTERM)

        def scale(number: int) -> None:
            assert main(["scale", str(run), str(number)]) == 0

        def listed() -> str:
            return cluster.job(job_id(run)).get("NodeList", "")

        def lose(node: str) -> None:
            cluster.kill_node(node)

        def come_back(node: str) -> None:
            until(lambda: node not in cluster.run("scontrol", "show", "hostnames", listed()).stdout, f"no {node}", 300)
            cluster.start_node(node)
            scale(3)

        events: list[tuple[Callable[[], None], int]] = [
            (lambda: kill(1), 2),
            (lambda: scale(3), 3),  # the killed rank's node is still in the allocation
            (lambda: leave(2), 2),
            (lambda: scale(3), 3),
            (lambda: scale(2), 2),  # gives a node back
            (lambda: scale(3), 3),  # by a new allocation
            (lambda: lose("node3"), 2),
            (lambda: come_back("node3"), 3),
            (lambda: lose("node1"), 2),  # the supervisor and the store's host
            (lambda: come_back("node1"), 3),
        ]
        sizes = [3]
        try:
            for event, size in events:
                until(lambda: len(generations(tmp_path / "ids")) >= len(sizes), f"generation {len(sizes)}")
                until_step(run, generations(tmp_path / "ids")[-1].first + 5)
                began = time.monotonic()
                event()
                sizes.append(size)
                until(lambda: len(generations(tmp_path / "ids")) >= len(sizes), f"generation {len(sizes)}", 240)
                print(f"{sizes[-2]} → {size} nodes in {time.monotonic() - began:.0f} s", flush=True)
            (tmp_path / "slow").unlink()
            assert cluster.wait(job_id(run), timeout=300) == "COMPLETED", said(run)
        finally:
            end_jobs(cluster, tmp_path)
    found = generations(tmp_path / "ids")
    ranks = [(generation.ranks, generation.first, generation.last) for generation in found]
    # a node that has just returned may get a late signal of SLURM, for the step that it lost, and leave once more
    assert [number for number, *_ in ranks][: len(sizes)] == sizes, (
        f"{ranks} {sizes} {attempts(run, 'start')} {said(run)}"
    )
    assert check_samples(found, STEPS) == STEPS * 12
    assert [m["step"] for m in metrics(run) if "loss" in m] == list(range(1, STEPS + 1))
    assert [start["ranks"] for start in attempts(run, "start") if start.get("ranks")]
    plain = ElasticRun(tmp_path / "plain", f"train.steps={STEPS}", "cluster.processes=2")
    assert plain.join() == 0, plain.screen
    assert apart(run, plain.run_dir) < 1e-5
