"""The settings of fsdp, tensor, pipeline and 3d change where things are, and not the maths."""

from __future__ import annotations

from pathlib import Path

import pytest

from dtrain.checkpoint.store import read_manifest
from dtrain.runs.folder import latest_checkpoint
from tests.world import losses, make_run, metrics, summary, train

OPTIONS = ["model.num_layers=4", "train.steps=6", "train.eval_batches=1", "schedule.warmup_steps=2"]
SP_LP = ["strategy.sequence_parallel=true", "strategy.loss_parallel=true"]
VARIANTS = [
    ("fsdp", 2, ["strategy.sharding=grad_op", "strategy.forward_prefetch=2", "strategy.backward_prefetch=2"]),
    ("fsdp", 4, ["strategy.sharding=hybrid", "strategy.replica_size=2"]),
    ("fsdp", 2, ["strategy.offload=cpu"]),
    ("tensor", 2, SP_LP),
    ("tensor", 2, ["strategy.sequence_parallel=true", "activation_checkpointing=full"]),
    ("tensor", 2, ["strategy.sequence_parallel=true", "activation_checkpointing=ops"]),
    ("tensor", 2, ["activation_checkpointing=ops"]),
    ("tensor", 4, ["strategy.tp=2", "strategy.data=ddp", "strategy.loss_parallel=true"]),
    ("tensor", 4, ["strategy.tp=2", *SP_LP]),
    ("pipeline", 2, ["strategy.schedule=gpipe", "strategy.split=[1]"]),
    ("pipeline", 2, ["strategy.schedule=interleaved_1f1b", "activation_checkpointing=full"]),
    ("pipeline", 2, ["activation_checkpointing=ops"]),
    ("pipeline", 1, ["strategy.schedule=interleaved_1f1b"]),
    ("pipeline", 2, ["strategy.schedule=zbv"]),
    ("pipeline", 4, ["strategy.pp=2", "strategy.schedule=zbv"]),
    ("pipeline", 4, ["strategy.pp=2", "strategy.data=ddp", "strategy.schedule=interleaved_1f1b"]),
    ("3d", 4, SP_LP),  # one data rank: the tied embedding's gradient comes whole, and its weight is cut
    ("3d", 8, [*SP_LP, "strategy.schedule=interleaved_1f1b"]),
]


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = make_run(tmp_path_factory.mktemp("one"), *OPTIONS, "cluster.processes=1")
    assert train(run, 1) == [0]
    return run


@pytest.mark.parametrize(
    ("strategy", "size", "options"), VARIANTS, ids=[f"{s}-{n}-{','.join(o)}" for s, n, o in VARIANTS]
)
def test_same_maths(strategy: str, size: int, options: list[str], reference: Path, tmp_path: Path) -> None:
    where = [f"strategy={strategy}", f"cluster.processes={size}", "train.micro_batch_size=1"]
    run = make_run(tmp_path / "run", *OPTIONS, *where, *options)
    assert train(run, size) == [0] * size
    ours, expected = losses(run), losses(reference)
    assert max(abs(ours[s] - expected[s]) for s in expected) < 1e-5
    norms = [[m["grad_norm"] for m in metrics(r) if "grad_norm" in m] for r in (run, reference)]
    assert max(abs(a - b) for a, b in zip(*norms, strict=True)) < 1e-5
    assert abs(summary(run)["val_loss"] - summary(reference)["val_loss"]) < 1e-5
    # saved right after an evaluation, which leaves layers gathered under some settings: those are not the weights
    saved = [read_manifest(latest_checkpoint(r) or Path()).tensors for r in (run, reference)]
    kinds = [{n: (t.shape, t.dtype) for n, t in tensors.items()} for tensors in saved]
    assert kinds[0] == kinds[1]


# zbv has both copies of the tied weight on one rank, of which a checkpoint holds one
@pytest.mark.parametrize(
    "options",
    [["strategy.schedule=zbv"], ["strategy.schedule=interleaved_1f1b", "strategy.pp=2", "cluster.processes=4"]],
)
def test_a_resume_is_bit_exact_also_with_dropout(options: list[str], tmp_path: Path) -> None:
    def run(name: str, *more: str) -> Path:
        base = ["strategy=pipeline", "cluster.processes=2", "model.dropout=0.1", "train.eval_every=2"]
        return make_run(tmp_path / name, *OPTIONS, *base, *options, *more)

    size = 4 if len(options) > 1 else 2
    whole, broken = run("whole"), run("broken", "train.stop_after=3")
    assert train(whole, size) == train(broken, size) == [0] * size
    run("broken")
    assert train(broken, size) == [0] * size
    assert summary(broken)["start_step"] == 3
    assert losses(whole) == losses(broken)
    assert summary(whole)["weights_sha256"] == summary(broken)["weights_sha256"]
