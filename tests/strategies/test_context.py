"""Runs that divide sequences: their checkpoints move, and other settings go with them. `dtrain verify` has more."""

from __future__ import annotations

from pathlib import Path

import pytest

from dtrain.runs.folder import latest_checkpoint
from tests.world import losses, make_run, summary, train

OPTIONS = [
    "train.steps=8", "train.micro_batch_size=2", "train.eval_batches=1", "schedule.warmup_steps=2",
    "model.vocab_size=64",  # nothing to pad: a loss= does not see the logits of the padding
]  # fmt: skip


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = make_run(tmp_path_factory.mktemp("one"), *OPTIONS, "cluster.processes=1")
    assert train(run, 1) == [0]
    return run


RING = ["strategy=fsdp", "strategy.cp=2", "cluster.processes=2"]
MOVES = [
    (RING, ["strategy=ddp", "cluster.processes=1"]),
    (["strategy=ddp", "cluster.processes=1"], [*RING, "strategy.cp_kind=ulysses"]),
    (RING, ["strategy=3d", "cluster.processes=4"]),
    (["strategy=zero3", "cluster.processes=2"], ["strategy=fsdp", "strategy.cp=2", "cluster.processes=4"]),
]


FOUR = ["strategy.cp=2", "cluster.processes=4"]
SETTINGS = {
    "sequence_parallel": [
        *FOUR, "strategy=tensor", "strategy.tp=2", "strategy.sequence_parallel=true", "strategy.loss_parallel=true",
    ],
    "loss": ["strategy=ddp", "strategy.cp=2", "cluster.processes=2", "loss=cross_entropy"],
    "zbv": [*FOUR, "strategy=pipeline", "strategy.pp=2", "strategy.schedule=zbv", "strategy.cp_kind=allgather"],
}  # fmt: skip


@pytest.mark.parametrize(("source", "target"), MOVES, ids=["ring-ddp", "ddp-ulysses", "ring-3d", "zero3-ring"])
def test_a_checkpoint_moves_to_and_from_other_layouts(
    source: list[str], target: list[str], reference: Path, tmp_path: Path
) -> None:
    run = make_run(tmp_path / "run", *OPTIONS, *source, "train.stop_after=4")
    assert set(train(run, size_of(source))) == {0}
    assert latest_checkpoint(run)
    make_run(run, *OPTIONS, *target)
    assert set(train(run, size_of(target))) == {0}
    follows(run, reference)


@pytest.mark.parametrize("setting", SETTINGS)
def test_other_settings_keep_the_maths(setting: str, reference: Path, tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", *OPTIONS, *SETTINGS[setting])
    assert set(train(run, size_of(SETTINGS[setting]))) == {0}
    follows(run, reference)


def follows(run: Path, reference: Path) -> None:
    ours, expected = losses(run), losses(reference)
    assert len(ours) == 8 and max(abs(ours[s] - expected[s]) for s in expected) < 1e-5
    assert abs(summary(run)["val_loss"] - summary(reference)["val_loss"]) < 1e-5


def size_of(options: list[str]) -> int:
    return int(next(o for o in options if o.startswith("cluster.processes="))[-1])
