"""A run is a function of (config, step): killed and resumed equals never interrupted; layouts are exchangeable."""

from __future__ import annotations

import itertools
import json
import random
import shutil
import time
from pathlib import Path

import pytest

from tests.parity.test_parity import STRATEGIES
from tests.world import losses, make_run, metrics, start, summary, train


def asked_for(path: Path, rank: int) -> list[list[int]]:
    """The sample ids that a rank asked for, step by step. The first of each life is a look at the shape."""
    return [json.loads(line) for line in Path(f"{path}-{rank}").read_text().splitlines()]


# with two ranks a sum has one order only; with three or more it could depend on DDP's buckets
@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_sigkill_and_resume_is_bit_exact(strategy: str, size: int, tmp_path: Path) -> None:
    def run(name: str) -> Path:
        return make_run(
            tmp_path / name,
            f"strategy={strategy}",
            f"cluster.processes={size}",
            "train.steps=60",
            "checkpoint.every=7",
            "model.dropout=0.1",
            "train.micro_batch_size=2",
            "+data.path=" + str(tmp_path / f"{name}-ids"),
            "data._target_=tests.recording.Recorder",
            "trust=[tests]",
            "data.num_samples=300",
        )

    whole, broken = run("whole"), run("broken")
    assert train(whole, size) == [0] * size

    rng = random.Random()
    kill_at = rng.randint(8, 50)  # any step after the first checkpoint; printed, so that a failure can be repeated
    print(f"killed when step {kill_at} was seen")
    world = start(broken, size)
    while not (done := metrics(broken)) or done[-1]["step"] < kill_at:
        assert world.ranks[0].exitcode is None
        time.sleep(0.001)
    world.kill()
    first_life = [asked_for(tmp_path / "broken-ids", r) for r in range(size)]
    assert train(broken, size) == [0] * size

    resumed_at = summary(broken)["start_step"]
    assert 0 < resumed_at <= 56 and resumed_at % 7 == 0
    hex_losses = [[(s, x.hex()) for s, x in losses(r).items()] for r in (whole, broken)]
    assert hex_losses[0] == hex_losses[1] and len(hex_losses[0]) == 60
    assert summary(whole)["weights_sha256"] == summary(broken)["weights_sha256"]
    for r in range(size):
        uninterrupted = asked_for(tmp_path / "whole-ids", r)[1:]
        second_life = asked_for(tmp_path / "broken-ids", r)[len(first_life[r]) + 1 :]
        assert first_life[r][1:] == uninterrupted[: len(first_life[r]) - 1]
        assert second_life == uninterrupted[resumed_at:]


@pytest.mark.timeout(600)  # a minute on a quiet machine
def test_any_layout_resumes_from_any_other(tmp_path: Path) -> None:
    layouts = list(itertools.product(STRATEGIES, (1, 2, 4)))
    options = ("train.steps=8", "train.max_grad_norm=0.5")

    def layout(run_dir: Path, strategy: str, size: int, stop_after: int) -> Path:
        make_run(
            run_dir, *options, f"strategy={strategy}", f"cluster.processes={size}", f"train.stop_after={stop_after}"
        )
        assert train(run_dir, size) == [0] * size
        return run_dir

    reference = losses(layout(tmp_path / "reference", "ddp", 1, 8))
    saved = {way: layout(tmp_path / f"{way[0]}-{way[1]}", *way, 4) for way in layouts}
    for source in layouts:
        for target in layouts:
            copy = tmp_path / "{}-{}-to-{}-{}".format(*source, *target)
            shutil.copytree(saved[source], copy)
            moved = losses(layout(copy, *target, 6))
            assert sorted(moved) == [1, 2, 3, 4, 5, 6]
            assert abs(moved[5] - reference[5]) < 1e-6, f"{source} → {target}: the next loss"
            assert abs(moved[6] - reference[6]) < 2e-6, (
                f"{source} → {target}: the loss after an update from loaded state"
            )
