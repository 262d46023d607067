"""Loss spikes: found at once, written down with their samples, and the run stops, skips the update or goes back."""

from __future__ import annotations

import json
import math
import os
import random
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from torch import Tensor

from dtrain.checkpoint import store
from dtrain.commands.verify.world import World
from dtrain.data.loader import Loader
from dtrain.launch import fork
from dtrain.runs.find import At
from dtrain.train import spikes
from dtrain.train.spikes import limit
from tests.strategies.test_replicas import notes, saved
from tests.world import losses, make_run, start_server, summary

BATCH = 8
BAD = 24 * BATCH  # position of the samples that step 25 would use


def spiking_rank(run_dir: Path, positions: list[int], pass_over: list[int], late: bool) -> int:
    """Train; the gradients of the batches at some positions are 50 times as large. Pass some over from the start."""
    from dtrain.strategies import base
    from dtrain.train import loop, process

    process.redirect_output(run_dir, int(os.environ["RANK"]))
    now: list[int] = []

    def batch(self: Loader, position: int) -> Any:
        now[:] = [position + BATCH * sum(position >= passed for passed in pass_over)]
        return read(self, now[0])

    def forward_backward(self: Any, inputs: Tensor, targets: Tensor) -> Tensor:
        loss = compute(self, inputs, targets)
        if now[0] in positions:
            for p in self.module.parameters():
                p.grad.mul_(50.0)
        return loss  # type: ignore[no-any-return]

    class Here(base.LateResult):
        def __init__(self, metrics: Tensor) -> None:
            self.metrics, self.arrived = metrics.clone(), SimpleNamespace(synchronize=lambda: None)  # type: ignore[assignment]

    read: Any = Loader.batch
    compute: Any = base.Strategy.forward_backward
    patched: Any = base
    Loader.batch = batch  # type: ignore[method-assign]
    patched.Strategy.forward_backward = forward_backward
    if late:  # as on a GPU, which decides by itself, and whose results are read one step later
        patched.LateResult = Here
        patched.Strategy.decides_on_device = lambda self: True
    return loop.main(run_dir)


def run_with(
    path: Path,
    *overrides: str,
    positions: tuple[int, ...] = (BAD,),
    passed: tuple[int, ...] = (),
    late: bool = False,
    size: int = 2,
) -> tuple[Path, list[int | None]]:
    start_server()
    options = ["train.steps=36", "checkpoint.every=10", "checkpoint.keep=99", f"cluster.processes={size}"]
    run = make_run(path, *options, "model.num_layers=1", *overrides)
    return run, World(size, spiking_rank, run, list(positions), list(passed), late).join()


def written(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / spikes.FILE).read_text().splitlines()]


def weights(run: Path) -> Any:
    return summary(run)["weights_sha256"]


# ---- the limit -----------------------------------------------------------------------------------------------


def test_a_limit_is_robust() -> None:
    draw = random.Random(1)
    usual = [3.0 + 0.05 * draw.gauss(0, 1) for _ in range(100)]
    assert limit(usual[: spikes.LEAST - 1]) == math.inf
    assert 3.4 < limit(usual) < 3.9
    assert limit([*usual[:90], *[50.0] * 10]) < 4.2, "spikes among the recent steps hardly move it"
    assert limit([2.0] * 30) == pytest.approx(2.4), "equal values leave room"
    assert limit([-1.0] * 30) == pytest.approx(-0.8)


def test_a_falling_loss_and_a_noisy_norm_are_no_spikes() -> None:
    draw = random.Random(2)
    loss = [10 * math.exp(-step / 80) + 2 + 0.1 * draw.gauss(0, 1) for step in range(1000)]
    norm = [0.5 * math.exp(0.3 * draw.gauss(0, 1)) for _ in range(1000)]
    for values in (loss, norm):
        assert not [i for i in range(20, 1000) if values[i] > limit(values[max(0, i - 100) : i])]
        assert 10 * values[-1] > limit(values[-100:])


# ---- runs ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("late", [False, True])
def test_stop(late: bool, tmp_path: Path) -> None:
    run, codes = run_with(tmp_path / "run", "train.spike=stop", "checkpoint.every=5", late=late)
    assert codes == [3, 3] and {note["type"] for note in notes(run)} == {"SpikeError"}
    (message,) = {note["message"] for note in notes(run)}
    assert re.match(r"step 25: loss [\d.]+ \(limit [\d.]+\), gradient norm [\d.]+ \(limit [\d.]+\): a spike\.", message)
    assert saved(run)[-1] == "step-00000020"
    (spike,) = written(run)
    assert spike["action"] == "stop" and spike["step"] == 25 and spike["grad_norm"] > spike["grad_norm_limit"]
    assert spike["loss"] < spike["loss_limit"], "here only the gradients are wrong"
    size = int(store.read_manifest(run / "checkpoints" / saved(run)[-1])["data"].split()[0])
    samples = Loader(range(size), BATCH, seed=0).global_indices(BAD)  # type: ignore[arg-type]
    assert spike["samples"] == samples.tolist() and (spike["begin"], spike["end"]) == (BAD, BAD + BATCH)


def test_skip_leaves_the_weights_alone(tmp_path: Path) -> None:
    run, codes = run_with(tmp_path / "run", "train.spike=skip")
    assert codes == [0, 0] and summary(run)["skipped_steps"] == 1
    assert [spike["action"] for spike in written(run)] == ["skip"]
    counts = store.read_manifest(run / "checkpoints" / "step-00000036")["extra"]["optimizer"]
    assert {count["step"] for count in counts.values()} == {35}
    late, codes = run_with(tmp_path / "late", "train.spike=skip", late=True)
    assert codes == [0, 0] and losses(late) == losses(run) and weights(late) == weights(run)
    off, codes = run_with(tmp_path / "off")
    assert codes == [0, 0] and not (off / spikes.FILE).exists()
    assert weights(off) != weights(run) and losses(off)[25] == losses(run)[25]


def test_a_resume_finds_the_same_spike(tmp_path: Path) -> None:
    """After 22 steps: without the recent losses in the checkpoint, too few would be known at step 25."""
    whole, codes = run_with(tmp_path / "whole", "train.spike=skip")
    assert codes == [0, 0]
    for stop_after in ("train.stop_after=22", "train.stop_after=36"):
        run, codes = run_with(tmp_path / "run", "train.spike=skip", stop_after)
        assert codes == [0, 0]
    assert losses(run) == losses(whole) and weights(run) == weights(whole) and len(written(run)) == 1


def test_rollback_passes_over_the_samples(tmp_path: Path) -> None:
    run, codes = run_with(tmp_path / "run", "train.spike=rollback")
    assert codes == [0, 0]
    expected, codes = run_with(tmp_path / "expected", positions=(), passed=(BAD,))
    assert codes == [0, 0]
    assert losses(run) == losses(expected) and list(losses(run)) == list(range(1, 37))
    assert weights(run) == weights(expected) and summary(run)["skipped_steps"] == 1
    assert [(spike["step"], spike["action"]) for spike in written(run)] == [(25, "rollback")]
    older, newer = (store.read_manifest(run / "checkpoints" / f"step-000000{n}") for n in (20, 30))
    assert older["samples"] == 20 * BATCH and "passed_over" not in older["spikes"]
    assert newer["samples"] == 31 * BATCH
    assert newer["spikes"]["passed_over"] == [{"step": 25, "begin": BAD, "end": BAD + BATCH}]


def test_a_rollback_to_the_start_of_a_fork_begins_its_new_optimizer_again(tmp_path: Path) -> None:
    """The fork's first checkpoint has AdamW's moments; those of the undone steps are no better."""
    parent, codes = run_with(tmp_path / "parent", "train.spike=rollback", "train.stop_after=20", size=1)
    assert codes == [0]
    forks = []
    for name, positions, passed in (("run", (BAD,), ()), ("expected", (), (BAD,))):
        start_server()
        options = ["train.steps=28", "checkpoint.every=1000", "cluster.processes=1", "model.num_layers=1"]
        run = make_run(tmp_path / name, *options, "train.spike=rollback", "optim=sgd", "optim.momentum=0.9")
        record = {"id": name, "forked_from": fork.lineage(At(parent, 20), ["optimizer"])}
        (run / "launch.json").write_text(json.dumps(record))
        fork.place(At(parent, 20), run)
        assert World(1, spiking_rank, run, list(positions), list(passed), False).join() == [0], notes(run)
        forks.append(run)
    run, expected = forks
    assert [(spike["step"], spike["action"]) for spike in written(run)] == [(25, "rollback")]
    assert losses(run) == losses(expected) and weights(run) == weights(expected)


def test_a_rollback_survives_a_stop_and_late_results(tmp_path: Path) -> None:
    """Stopped before the passed-over samples are reached, and after."""
    run, codes = run_with(tmp_path / "run", "train.spike=rollback")
    assert codes == [0, 0]
    for stops in ((23, 36), (32, 36)):
        for stop in stops:
            part, codes = run_with(tmp_path / f"stopped-{stops[0]}", "train.spike=rollback", f"train.stop_after={stop}")
            assert codes == [0, 0]
        assert losses(part) == losses(run) and weights(part) == weights(run)
    late, codes = run_with(tmp_path / "late", "train.spike=rollback", late=True)
    assert codes == [0, 0] and losses(late) == losses(run) and weights(late) == weights(run)


def test_a_second_spike_at_the_same_step_stops(tmp_path: Path) -> None:
    run, codes = run_with(tmp_path / "run", "train.spike=rollback", positions=(BAD, BAD + BATCH))
    assert codes == [3, 3]
    assert "went back for a spike at this step before" in notes(run)[0]["message"]
    assert [(spike["step"], spike["action"]) for spike in written(run)] == [(25, "rollback"), (25, "stop")]
    assert saved(run)[-1] == "step-00000020"


def test_many_in_a_row_are_no_spikes(tmp_path: Path) -> None:
    positions = tuple(BAD + i * BATCH for i in range(12))
    run, codes = run_with(tmp_path / "run", "train.spike=skip", positions=positions)
    assert codes == [3, 3] and "6 in a row are not spikes" in notes(run)[0]["message"]


def test_without_a_checkpoint_there_is_nothing_to_go_back_to(tmp_path: Path) -> None:
    run, codes = run_with(tmp_path / "run", "train.spike=rollback", "checkpoint.every=30")
    assert codes == [3, 3] and "no checkpoint to go back to" in notes(run)[0]["message"]
