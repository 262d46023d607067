"""The same promises on a CUDA device: `pytest -m gpu` on a machine that has one."""

from __future__ import annotations

import random
import shutil
from pathlib import Path

import pytest

from dtrain.config import build, load
from tests.world import STRATEGIES, losses, make_run, sizes_of, start, summary, train, wait_for

pytestmark = pytest.mark.gpu
ON_ONE_RANK = [s for s in STRATEGIES if 1 in sizes_of(s, (1,))]  # 3d needs four GPUs


def allowed(run: Path, usual: float) -> float:
    return build(load(run).strategy).tolerance or usual


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> dict[int, float]:
    run = make_run(tmp_path_factory.mktemp("one"), "cluster.processes=1")
    assert train(run, 1) == [0]
    assert summary(run)["device"] != "cpu"
    return losses(run)


@pytest.mark.parametrize("size", [1, 2])  # two ranks share the GPU, over gloo
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_follows_one_process(strategy: str, size: int, reference: dict[int, float], tmp_path: Path) -> None:
    options = [f"strategy={strategy}", f"cluster.processes={size}", "train.micro_batch_size=1"]
    try:
        run = make_run(tmp_path, *options)
    except ValueError as refusal:
        pytest.skip(str(refusal).splitlines()[0])
    assert train(run, size) == [0] * size
    assert max(abs(losses(run)[s] - reference[s]) for s in reference) < allowed(run, 1e-5)


@pytest.mark.parametrize("compile", ["false", "true"])
@pytest.mark.parametrize("precision, tolerance", [("bf16", 0.02), ("fp16", 0.01)])
@pytest.mark.parametrize("strategy", ON_ONE_RANK)
def test_half_precision(
    strategy: str, precision: str, tolerance: float, compile: str, reference: dict[int, float], tmp_path: Path
) -> None:
    options = [f"strategy={strategy}", f"precision={precision}", "cluster.processes=1", f"compile={compile}"]
    try:
        run = make_run(tmp_path, *options)
    except ValueError as refusal:
        pytest.skip(str(refusal).splitlines()[0])
    assert train(run, 1) == [0]
    skipped = summary(run)["skipped_steps"]
    assert skipped <= 3
    if not skipped:  # a skipped step shifts the curve
        assert max(abs(losses(run)[s] - reference[s]) for s in reference) < tolerance
    assert losses(run)[20] < losses(run)[1]


# 64 a head and 1024 tokens: the shapes at which flash attention is chosen
@pytest.mark.parametrize("shape", [[], ["model.dim=256", "model.seq_len=1024"]])
@pytest.mark.parametrize("strategy", ON_ONE_RANK)
def test_sigkill_and_resume_is_bit_exact(strategy: str, shape: list[str], tmp_path: Path) -> None:
    def run(name: str) -> Path:
        options = ["cluster.processes=1", "train.steps=60", "checkpoint.every=7", "model.dropout=0.1", "precision=bf16"]
        return make_run(tmp_path / name, f"strategy={strategy}", *options, *shape)

    whole, broken = run("whole"), run("broken")
    assert train(whole, 1) == [0]
    world = start(broken, 1)
    wait_for(world, broken, random.randint(8, 45))
    world.kill()
    assert train(broken, 1) == [0]
    assert summary(broken)["start_step"] > 0
    assert losses(whole) == losses(broken) and len(losses(whole)) == 60
    assert summary(whole)["weights_sha256"] == summary(broken)["weights_sha256"]


def test_a_checkpoint_moves_between_cpu_and_gpu(tmp_path: Path) -> None:
    options = ("cluster.processes=1", "train.steps=8")
    no_gpu = {"CUDA_VISIBLE_DEVICES": ""}
    assert train(make_run(tmp_path / "cpu", *options, "strategy=fsdp", "train.stop_after=4"), 1, no_gpu) == [0]
    shutil.copytree(tmp_path / "cpu", tmp_path / "moved")
    assert train(make_run(tmp_path / "cpu", *options), 1, no_gpu) == [0]
    assert train(make_run(tmp_path / "moved", *options, "strategy=ddp"), 1) == [0]
    cpu, moved = losses(tmp_path / "cpu"), losses(tmp_path / "moved")
    assert summary(tmp_path / "cpu")["device"] == "cpu" != summary(tmp_path / "moved")["device"]
    assert max(abs(cpu[s] - moved[s]) for s in range(5, 9)) < 1e-5
