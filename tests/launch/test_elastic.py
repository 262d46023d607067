"""Elastic runs as a user meets them: real launches whose ranks leave, are killed and join."""

from __future__ import annotations

import os
import random
import signal
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import pytest

from dtrain.cli import main
from tests.elastic import ElasticRun, apart, assess, attempts, check_samples, disturb
from tests.launch.test_local import assert_no_orphans
from tests.patience import until
from tests.world import losses, metrics, summary

STARTED: list[ElasticRun] = []


def launch(folder: Path, *overrides: str, pause: float = 0.0) -> ElasticRun:
    STARTED.append(ElasticRun(folder, *overrides, pause=pause))
    return STARTED[-1]


@pytest.fixture(autouse=True)
def nothing_is_left() -> Iterator[None]:
    yield
    for run in STARTED:
        run.kill()
    STARTED.clear()


def test_ranks_leave_are_killed_and_join_and_the_run_is_the_same(tmp_path: Path) -> None:
    """From 3 ranks: rank 0, which hosts the store, is killed; rank 1 leaves; 3 ranks are asked for."""
    steps, options = 90, ["strategy=fsdp", "cluster.processes=1:3", "checkpoint.every=10"]
    run = launch(tmp_path / "a", f"train.steps={steps}", *options, pause=0.02)
    run.wait_for_step(15)
    assert main(["status", str(run.run_dir)]) == 0
    run.signal(0, signal.SIGKILL)
    until(lambda: run.num_ranks == 2, "2 ranks", 60, lambda: run.screen)
    run.wait_for_step(35)
    run.signal(1, signal.SIGTERM)
    until(lambda: run.num_ranks == 1, "1 rank", 60, lambda: run.screen)
    run.wait_for_step(50)
    assert main(["scale", str(run.run_dir), "4"]) == 2, "above the range"
    assert main(["scale", str(run.run_dir), "3"]) == 0
    assert run.join() == 0, run.screen
    assert summary(run.run_dir)["world_size"] == 3

    generations = run.generations()
    assert [generation.ranks for generation in generations] == [3, 2, 1, 3]
    assert check_samples(generations, steps) == steps * 12
    killed, left, joined = (b.last + 1 - a.first for b, a in pairwise(generations))
    assert 0 <= killed <= 12 and left == 0 and joined == 0, "a kill loses the steps since the save, the others none"
    assert [m["step"] for m in metrics(run.run_dir) if "loss" in m] == list(range(1, steps + 1)), "one curve"

    plain = launch(tmp_path / "b", f"train.steps={steps}", "cluster.processes=1")
    assert plain.join() == 0, plain.screen
    assert apart(run.run_dir, plain.run_dir) < 1e-5

    ends = [line for line in attempts(run.run_dir) if line["event"] == "end"]
    assert [line["code"] for line in ends] == [3, 75, 75, 0]
    assert "rank 0: SIGKILL" in ends[0]["why"] and ends[1]["why"] == "rank 1 left" and "3 ranks" in ends[2]["why"]
    assert [line["ranks"] for line in attempts(run.run_dir) if line["event"] == "start"] == [3, 2, 1, 3]
    assert_no_orphans(run.run_dir)


def test_a_survivor_that_holds_a_copy_saves_it(tmp_path: Path) -> None:
    """Under ddp a kill loses no step, also without a checkpoint, and the metrics of no step."""
    run = launch(tmp_path, "train.steps=30", "cluster.processes=1:2", "checkpoint.every=0", pause=0.05)
    run.wait_for_step(8)
    run.signal(0, signal.SIGKILL)
    assert run.join() == 0, run.screen
    before, after = run.generations()
    assert (before.ranks, after.ranks) == (2, 1)
    assert before.last == after.first >= 8, "only the step that was interrupted is repeated"
    assert check_samples([before, after], 30) == 30 * 12
    assert [m["step"] for m in metrics(run.run_dir) if "loss" in m] == list(range(1, 31))
    assert "saved step" in (run.run_dir / "logs" / "rank-1.log").read_text()


def test_too_few_ranks_end_the_run_saved(tmp_path: Path) -> None:
    """Ranks that leave below the smallest number stop the run, saved."""
    run = launch(tmp_path, "train.steps=60", "cluster.processes=2:3", "checkpoint.every=50", pause=0.05)
    run.wait_for_step(5)
    for rank in (0, 2):
        run.signal(rank, signal.SIGTERM)
    assert run.join() == 75, run.screen
    made = summary(run.run_dir)["steps"]
    assert 5 <= made < 60 and summary(run.run_dir)["status"] == "preempted"
    assert max(losses(run.run_dir)) == made
    assert_no_orphans(run.run_dir)


@pytest.mark.timeout(600)
@pytest.mark.parametrize("strategy", ["ddp", "fsdp", "tensor", "zero2"])
def test_random_events(strategy: str, tmp_path: Path) -> None:
    """12 events over 150 steps; benchmarks/elastic.py has 50 over 600."""
    seed = int(os.environ.get("SOAK_SEED", "0"))
    steps, every = 150, 20
    options = [f"train.steps={steps}", f"strategy={strategy}", f"checkpoint.every={every}"]
    run = launch(tmp_path / "a", *options, "cluster.processes=1:4", pause=0.02)
    events = disturb(run, 12, steps, [1, 2, 3, 4], random.Random(seed))
    assert run.join() == 0, run.screen
    rows = assess(events, run.generations())
    assert check_samples(run.generations(), steps) == steps * 12
    assert all(row["lost_steps"] <= (every + 2 if row["kind"] == "kill" else 0) for row in rows), rows

    plain = launch(tmp_path / "b", *options, "cluster.processes=2")
    assert plain.join() == 0, plain.screen
    assert apart(run.run_dir, plain.run_dir) < 1e-5
