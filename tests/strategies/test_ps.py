"""A parameter server: in sync it is ddp (tests/parity); async and bounded lose no sample, and save one model."""

from __future__ import annotations

import json
import os
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from dtrain.comm.parameter_server import copy_from_owners, sum_at_owners
from dtrain.runs.protocol import PREEMPTED
from dtrain.strategies.ps import STEPS_AHEAD, ParameterServer
from tests.world import losses, make_run, metrics, spawn, start, summary, train, wait_for

PIECES = 4  # micro-batches of a step


def run_of(run_dir: Path, mode: str, *options: str, size: int = 2) -> Path:
    common = [
        "strategy=ps",
        f"strategy.mode={mode}",
        f"cluster.processes={size}",
        f"train.micro_batch_size={8 // PIECES}",
    ]
    return make_run(run_dir, *common, *options)


def sums_and_copies() -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    weights = [nn.Parameter(torch.full((2, 3), float(10 * rank + i))) for i in range(4)]
    shards = [weights[:3], [], weights[3:]][:size]  # rank 1 owns nothing
    for i, p in enumerate(weights):
        p.grad = None if i == 1 else torch.full((2, 3), 2.0**rank)
    sum_at_owners(shards)
    found = [None if p.grad is None else p.grad[1, 2].item() for p in weights]
    assert found == {0: [7.0, 0.0, 7.0, None], 1: [None] * 4, 2: [None, None, None, 7.0]}[rank]
    copy_from_owners(shards)
    assert [p[0, 0].item() for p in weights] == [0.0, 1.0, 2.0, 23.0]


def test_gradients_are_summed_at_their_owner_and_weights_come_from_it() -> None:
    spawn(3, sums_and_copies)


# ---- async and bounded ---------------------------------------------------------------------------------------


def test_async_loses_nothing_at_a_resume_and_a_slow_rank_takes_fewer_pieces(tmp_path: Path) -> None:
    for stop in (6, 12):
        options = ["train.steps=20", f"train.stop_after={stop}", "checkpoint.every=3", "train.eval_batches=1"]
        run = run_of(tmp_path / "run", "async", *options, "train.eval_every=4", "strategy.slow_rank=1")
        assert train(run, 2) == [0, 0]
        found = summary(run)
        assert found["status"] == "done" and found["start_step"] == stop - 6
        pieces: dict[str, Any] = found["ps"]
        assert sum(pieces["pieces"]) == pieces["updates"] == 6 * PIECES, "each piece is one update of each server"
        assert pieces["pieces"][0] > 1.5 * pieces["pieces"][1] > 0 and pieces["largest_staleness"] > 0
    assert sorted(losses(run)) == list(range(1, 13))
    assert [m["step"] for m in metrics(run) if "val_loss" in m] == [4, 6, 8, 12]
    manifest = json.loads((run / "checkpoints" / "step-00000012" / "manifest.json").read_text())
    assert manifest["samples"] == 12 * 8
    counts = manifest["extra"]["optimizer"].values()
    assert all(count == {"step": 12.0 * PIECES} for count in counts), "both lives' updates are in every weight"
    one = make_run(tmp_path / "one", "train.steps=20", "train.stop_after=12", "cluster.processes=1")
    assert train(one, 1) == [0]
    assert max(abs(losses(run)[s] - losses(one)[s]) for s in losses(one)) < (
        ParameterServer(mode="async").tolerance or 0
    )


@pytest.mark.slow
@pytest.mark.timeout(600)  # 1 minute on a quiet machine
def test_bounded_never_exceeds_its_staleness_in_1000_updates(tmp_path: Path) -> None:
    options = ["train.steps=250", "strategy.staleness=6", "strategy.slow_rank=2", "strategy.slow_factor=5"]
    run = run_of(tmp_path / "run", "bounded", *options, size=4)
    assert train(run, 4) == [0] * 4
    found = summary(run)["ps"]
    assert found["updates"] == 1000 and found["largest_staleness"] == 6, found
    assert min(found["pieces"]) == found["pieces"][2], found


@pytest.mark.slow
def test_what_async_saves_is_one_model_that_others_continue_with(tmp_path: Path) -> None:
    options = ["train.steps=20", "checkpoint.keep=9", "checkpoint.every=3"]
    run = run_of(tmp_path / "async", "async", "train.stop_after=6", *options)
    assert train(run, 2) == [0, 0]
    after = {}
    for name, size in (("ddp", 1), ("ps", 2), ("fsdp", 2)):
        shutil.copytree(run, tmp_path / name)
        words = (f"strategy={name}", f"cluster.processes={size}", "train.stop_after=8", *options)
        assert train(make_run(tmp_path / name, *words), size) == [0] * size
        after[name] = [losses(tmp_path / name)[step] for step in (7, 8)]
    assert after["ps"] == pytest.approx(after["ddp"], abs=1e-5)
    assert after["fsdp"] == pytest.approx(after["ddp"], abs=1e-5)


@pytest.mark.slow
def test_a_stop_ends_all_ranks_after_the_same_step(tmp_path: Path) -> None:
    run = run_of(tmp_path / "run", "async", "train.steps=5000", "checkpoint.every=3", "strategy.slow_rank=0")
    world = start(run, 2)
    wait_for(world, run, 5)
    pid = world.ranks[1].pid
    assert pid
    os.kill(pid, signal.SIGTERM)
    assert world.join() == [PREEMPTED, PREEMPTED]
    last = max(losses(run))
    assert summary(run)["status"] == "preempted" and STEPS_AHEAD < last < 5000
    assert (run / "checkpoints" / "latest").read_text().strip() == f"step-{last:08d}"


@pytest.mark.slow
@pytest.mark.parametrize("killed", [0, 1])
def test_a_lost_rank_ends_the_others(killed: int, tmp_path: Path) -> None:
    run = run_of(tmp_path / "run", "bounded", "strategy.staleness=4", "train.steps=5000", "checkpoint.every=3", size=4)
    world = start(run, 4)
    wait_for(world, run, 5)
    world.ranks[killed].kill()
    codes = world.join()
    assert [code for rank, code in enumerate(codes) if rank != killed] == [3, 3, 3]
