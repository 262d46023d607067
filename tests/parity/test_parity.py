"""Same maths: every strategy of conf/strategy, at every world size, follows one process."""

from __future__ import annotations

from pathlib import Path

import pytest

from dtrain.config import CONF
from tests.world import losses, make_run, metrics, summary, train

STRATEGIES = sorted(p.stem for p in (CONF / "strategy").glob("*.yaml"))


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = make_run(tmp_path_factory.mktemp("one"), "cluster.processes=1", "train.eval_batches=2")
    assert train(run, 1) == [0]
    return run


@pytest.mark.parametrize("world_size", [1, 2, 4])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_follows_one_process(strategy: str, world_size: int, reference: Path, tmp_path: Path) -> None:
    # a micro-batch of 1 or 2 makes every world size accumulate, each a different number of times
    run = make_run(
        tmp_path,
        f"strategy={strategy}",
        f"cluster.processes={world_size}",
        "train.micro_batch_size=1",
        "train.eval_batches=2",
    )
    assert train(run, world_size) == [0] * world_size
    ours, expected = losses(run), losses(reference)
    assert len(ours) == 20
    assert max(abs(ours[s] - expected[s]) for s in expected) < 1e-5
    norms = [[m["grad_norm"] for m in metrics(r) if "grad_norm" in m] for r in (run, reference)]
    assert max(abs(a - b) for a, b in zip(*norms, strict=True)) < 1e-4
    assert abs(summary(run)["val_loss"] - summary(reference)["val_loss"]) < 1e-5
    assert expected[20] < expected[1] - 0.1, "the reference must learn, or equality means little"


@pytest.mark.parametrize(
    "options",
    [
        ["activation_checkpointing=full"],
        ["activation_checkpointing=selective", "activation_checkpointing_every=2"],
        ["strategy.reshard_after_forward=false"],
    ],
)
def test_memory_settings_do_not_change_the_maths(options: list[str], reference: Path, tmp_path: Path) -> None:
    run = make_run(tmp_path, "strategy=fsdp", "cluster.processes=2", *options)
    assert train(run, 2) == [0, 0]
    assert max(abs(losses(run)[s] - losses(reference)[s]) for s in losses(reference)) < 1e-5


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_half_precision_stays_near(strategy: str, precision: str, reference: Path, tmp_path: Path) -> None:
    # bf16 keeps 8 bits: a relative error of 4e-3 a product; 0.02 on a loss of 4 is little more than one of them
    run = make_run(
        tmp_path, f"strategy={strategy}", f"precision={precision}", "cluster.processes=2", "train.stop_after=4"
    )
    assert train(run, 2, env={"DNNL_DEFAULT_FPMATH_MODE": "ANY"}) == [0, 0]
    assert max(abs(losses(run)[s] - losses(reference)[s]) for s in range(1, 5)) < 0.02
    assert losses(run) != {s: losses(reference)[s] for s in range(1, 5)}, "the precision had no effect at all"


def test_bf16_means_the_same_under_every_strategy(reference: Path, tmp_path: Path) -> None:
    """Products in bf16, norms and the residual stream in fp32: then the curves lie as near to each other as to fp32."""
    curves = {"fp32": losses(reference)}
    for strategy in STRATEGIES:
        run = make_run(tmp_path / strategy, f"strategy={strategy}", "precision=bf16", "cluster.processes=1")
        assert train(run) == [0]
        curves[strategy] = losses(run)
    distance = {name: max(abs(c[s] - curves["fp32"][s]) for s in c) for name, c in curves.items()}
    print(distance)
    assert max(distance.values()) < 1.5e-3
