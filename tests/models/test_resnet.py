"""ResNet: the published sizes, batch norm over all ranks, statistics in checkpoints; it learns."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.flop_counter import FlopCounterMode

from dtrain.checkpoint import store
from dtrain.checkpoint.initial_weights import Drawn
from dtrain.commands.verify import compare
from dtrain.config.build import build
from dtrain.models.batchnorm import EPS, MOMENTUM, BatchNorm
from dtrain.models.resnet import ResNet
from dtrain.runs.folder import latest_checkpoint
from dtrain.strategies.materialize import init_weights
from dtrain.strategies.recompute import checkpoint_layers
from tests.models.vision import make_run
from tests.patience import patience
from tests.world import ROOT, losses, spawn, summary, train

PUBLISHED = {"resnet18": (11_689_512, 1.814), "resnet50": (25_557_032, 4.089)}  # parameters, billion multiplications
# 0.2 million parameters: all parts, also a stage whose pictures are one pixel
TINY = [
    "model=resnet18", "model.image_size=8", "model.channels=1", "model.num_classes=10", "model.width=8",
    "model.blocks=[1,1,1,1]", "optim.lr=3e-3",
]  # fmt: skip


def small(**changes: object) -> ResNet:
    chosen = {"blocks": [1, 1], "bottleneck": False, "image_size": 8, "channels": 1, "num_classes": 10, "width": 8}
    model = ResNet(**(chosen | changes))  # type: ignore[arg-type]
    init_weights(model, Drawn(0))
    return model


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_numbers_of_parameters_and_multiplications(name: str) -> None:
    with torch.device("meta"):
        model = build(compare.compose([f"model={name}"]).model)
        images = torch.empty(1, 3, 224, 224)
    model.eval()
    parameters, multiplications = PUBLISHED[name]
    assert model.num_parameters == parameters
    with FlopCounterMode(display=False) as counter:
        model(images)
    assert counter.get_total_flops() / 2e9 == pytest.approx(multiplications, rel=1e-3)


@pytest.mark.parametrize("changes", [
    {}, {"bottleneck": True, "blocks": [2, 1, 1]}, {"image_size": 65, "channels": 3}, {"stem": "large"},
])  # fmt: skip
def test_flops_are_those_of_a_step(changes: dict[str, object]) -> None:
    model = small(**changes)
    images = torch.randn(2, model.stem.in_channels, model.image_size, model.image_size)
    with FlopCounterMode(display=False) as counter:
        model(images, torch.tensor([0, 1])).backward()
    assert counter.get_total_flops() == 2 * model.flops_per_sample()


def test_a_block_can_begin_as_its_shortcut() -> None:
    x = torch.rand(4, 8, 8, 8)
    assert torch.equal(small(zero_init=True).layers["0"](x), x), (
        "what is not negative passes a block of zeros unchanged"
    )
    assert not torch.equal(small().layers["0"](x), x)


@pytest.mark.gpu
def test_a_gpu_computes_the_same_and_keeps_statistics_in_float32() -> None:
    x, y = torch.randn(8, 1, 8, 8), torch.arange(8)
    ours, theirs = small(), small().cuda()
    loss = ours(x, y)
    torch.testing.assert_close(theirs(x.cuda(), y.cuda()).cpu(), loss, rtol=1e-3, atol=1e-3)
    with torch.autocast("cuda", torch.bfloat16):
        theirs(x.cuda(), y.cuda()).backward()
    assert all(b.dtype == torch.float32 and torch.isfinite(b).all() for b in theirs.buffers())
    assert theirs.stem.weight.grad is not None and torch.isfinite(theirs.stem.weight.grad).all()


# ---- batch norm ----------------------------------------------------------------------------------------------


def norm(channels: int, mode: str = "sync") -> BatchNorm:
    module = BatchNorm(channels, mode)  # type: ignore[arg-type]
    for name, tensor in [*module.named_parameters(), *module.named_buffers()]:
        torch.nn.init.constant_(tensor.data, 1.0 if name in ("weight", "running_var") else 0.0)
    return module


@settings(max_examples=25, deadline=None)
@given(st.integers(1, 5), st.integers(1, 4), st.integers(1, 4), st.floats(-10, 10), st.integers(0, 9))
def test_one_process_computes_what_torch_does(batch: int, channels: int, side: int, mean: float, seed: int) -> None:
    x = torch.randn(batch, channels, side, side, generator=torch.Generator().manual_seed(seed)) + mean
    ours, theirs = norm(channels), torch.nn.BatchNorm2d(channels, EPS, MOMENTUM)
    if batch * side == 1:  # a variance of one value does not exist: torch refuses, and here it is not remembered
        assert ours(x).abs().max() < 1e-3 and torch.equal(ours.running_var, torch.ones(channels))
        return
    torch.testing.assert_close(ours(x), theirs(x))
    torch.testing.assert_close(ours.running_mean, theirs.running_mean)
    torch.testing.assert_close(ours.running_var, theirs.running_var)
    torch.testing.assert_close(ours.eval()(x), theirs.eval()(x))


def test_what_memory_held_before_does_not_matter(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "empty_like", lambda x: torch.full_like(x, float("nan")))
    module = norm(2)
    module(torch.ones(2, 2, 2, 2))
    torch.testing.assert_close(module.running_mean, torch.full((2,), MOMENTUM))


def test_a_batch_that_is_not_finite_is_not_remembered() -> None:
    module = norm(2)
    x = torch.ones(2, 2, 2, 2)
    x[0, 0, 0, 0] = float("nan")
    module(x)
    assert torch.isfinite(module.running_mean).all() and module.running_mean[1] > 0


def test_statistics_stay_float32_and_results_have_the_type_of_their_input() -> None:
    module = norm(2).bfloat16()
    assert module.weight.dtype == torch.bfloat16
    assert module.running_mean.dtype == module.running_var.dtype == torch.float32
    x = torch.randn(8, 2, 4, 4) + 100
    assert module(x.bfloat16()).dtype == torch.bfloat16
    torch.testing.assert_close(module.running_mean, 0.1 * x.bfloat16().float().mean(dim=(0, 2, 3)))


def test_recomputed_layers_are_counted_once() -> None:
    plain, recomputed = small(), small()
    checkpoint_layers(recomputed, "full", 1)
    x, y = torch.randn(4, 1, 8, 8), torch.arange(4)
    for model in (plain, recomputed):
        model(x, y).backward()
    assert all(torch.equal(a, b) for a, b in zip(plain.buffers(), recomputed.buffers(), strict=True))
    torch.testing.assert_close(recomputed.stem.weight.grad, plain.stem.weight.grad, rtol=0, atol=0)


def _two_ranks() -> None:
    rank = dist.get_rank()
    generator = torch.Generator().manual_seed(0)
    whole = (torch.randn(6, 3, 4, 4, generator=generator) * 2 + 5).requires_grad_()
    weights = torch.randn(6, 3, 4, 4, generator=generator)
    one, two = torch.nn.BatchNorm2d(3), norm(3)
    (one(whole) * weights).sum().backward()
    assert whole.grad is not None and one.weight.grad is not None
    mine = whole.detach()[3 * rank : 3 * rank + 3].requires_grad_()
    out = two(mine)
    torch.testing.assert_close(out, one(whole)[3 * rank : 3 * rank + 3], rtol=1e-5, atol=3e-5)
    torch.testing.assert_close(two.running_mean, 0.1 * whole.mean(dim=(0, 2, 3)))
    torch.testing.assert_close(two.running_var, 0.9 + 0.1 * whole.var(dim=(0, 2, 3)), rtol=1e-5, atol=1e-4)
    (out * weights[3 * rank : 3 * rank + 3]).sum().backward()
    torch.testing.assert_close(mine.grad, whole.grad[3 * rank : 3 * rank + 3], rtol=1e-4, atol=1e-5)
    gradient = two.weight.grad
    assert mine.grad is not None and gradient is not None
    dist.all_reduce(gradient)
    torch.testing.assert_close(gradient, one.weight.grad, rtol=1e-4, atol=1e-4)


def test_two_ranks_normalise_as_one() -> None:
    spawn(2, _two_ranks)


def _local() -> None:
    model = small(batch_norm="local")
    generator = torch.Generator().manual_seed(dist.get_rank())
    x = torch.randn(4, 1, 8, 8, generator=generator)
    expected = small(batch_norm="local")
    first = expected.stem(x).mean(dim=(0, 2, 3))
    model(x, torch.arange(4)).backward()
    mean = first.detach().clone()
    dist.all_reduce(mean)
    torch.testing.assert_close(model.stem_norm.running_mean, MOMENTUM * mean / 2)
    assert not torch.allclose(model.stem_norm.running_mean, MOMENTUM * first), "each rank saw other samples"
    for buffer in model.buffers():
        other = buffer.clone()
        dist.broadcast(other, src=0)
        assert torch.equal(buffer, other), "any rank's statistics may be saved, at any step"


def test_local_statistics_are_the_same_on_all_ranks() -> None:
    spawn(2, _local)


# ---- runs ----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the runs of one process and of two ranks under ddp are, never interrupted."""
    path = tmp_path_factory.mktemp("resnet")
    assert train(make_run(path / "one", *TINY)) == [0]
    assert train(make_run(path / "ddp", *TINY), 2) == [0, 0]
    return path


@pytest.mark.parametrize("strategy", ["ddp", "fsdp", "zero2"])
def test_two_ranks_follow_one_process(folder: Path, strategy: str) -> None:
    run_dir = folder / strategy
    if strategy != "ddp":
        assert train(make_run(run_dir, *TINY, f"strategy={strategy}"), 2) == [0, 0]
    found = compare.compare(run_dir, folder / "one")
    assert found.loss < 1e-5, "also of the validation, which uses the running statistics"
    assert found.weight < 0.01 * found.way


def test_a_resume_is_exact_and_another_strategy_goes_on_with_the_same_statistics(folder: Path, tmp_path: Path) -> None:
    run_dir, other = tmp_path / "run", tmp_path / "other"
    assert train(make_run(run_dir, *TINY, "train.stop_after=5"), 2) == [0, 0]
    half = statistics(run_dir)
    shutil.copytree(run_dir, other)
    assert train(make_run(run_dir, *TINY), 2) == [0, 0]
    assert losses(run_dir) == losses(folder / "ddp")
    assert summary(run_dir)["weights_sha256"] == summary(folder / "ddp")["weights_sha256"], "statistics are among them"
    assert all(not torch.equal(value, half[name]) for name, value in statistics(run_dir).items())
    assert train(make_run(other, *TINY, "strategy=fsdp"), 2) == [0, 0]
    assert losses(other) == pytest.approx(losses(folder / "one"), abs=1e-5)


def statistics(run_dir: Path) -> dict[str, torch.Tensor]:
    path = latest_checkpoint(run_dir)
    assert path is not None
    found = {name: tensor.clone() for name, tensor in store.weights(path) if "running" in name}
    assert len(found) == 2 * (1 + 4 * 2 + 3)
    return found


def test_tensor_and_pipeline_are_refused_before_the_launch(tmp_path: Path) -> None:
    for strategy, axis, plan in (("tensor", "tp", "tp_plan"), ("pipeline", "pp", "pipeline_split")):
        command = [sys.executable, "launch.py", "model=resnet18", f"strategy={strategy}", f"run_dir={tmp_path}/x"]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=patience(60))
        assert done.returncode == 2, done.stderr
        assert f"strategy.{axis}=2" in done.stderr and f"ResNet has no {plan}()" in done.stderr, done.stderr
        assert "fix: strategy=ddp, fsdp or zero3" in done.stderr


def test_it_learns_the_digits(tmp_path: Path) -> None:
    """ResNet-18 with an eighth of the channels, on pictures of 8x8 pixels: it came to 97.2% of the held-out digits."""
    settings = ["train.steps=100", "optim.lr=5e-3", "train.global_batch_size=60", "train.eval_batches=6"]
    run_dir = make_run(tmp_path / "run", *TINY, "model.blocks=[2,2,2,2]", "schedule.warmup_steps=20", *settings)
    assert train(run_dir) == [0]
    assert summary(run_dir)["val_accuracy"] >= 0.95
