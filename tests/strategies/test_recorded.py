"""A step that is one launch has the bits of one that is launched kernel by kernel."""

from __future__ import annotations

import os
from typing import Any, Literal

import pytest
import torch
from torch import Tensor

from dtrain.strategies.base import Strategy
from dtrain.strategies.recorded import STEPS_BEFORE
from dtrain.strategies.shared import local

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Any:
    import torch.distributed as dist

    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # or torch refuses to be deterministic
    store = tmp_path_factory.mktemp("world") / "store"
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def strategy_of(graphs: Literal["auto", "none"], *words: str) -> Strategy:
    from dtrain.compose import compose
    from dtrain.config import Settings, build
    from dtrain.models import build as models

    torch.cuda.reset_peak_memory_stats()  # of other tests: what a step takes is asked for
    sizes = ["model.num_layers=2", "model.dim=128", "model.num_heads=2", "model.seq_len=64"]
    cfg = Settings(compose(["model=gpt2-tiny", "precision=bf16", "cluster.processes=1", *sizes, *words]))
    strategy: Strategy = build(cfg.strategy)
    strategy.resolve_mesh(1, 1)
    strategy.setup(
        models.make(cfg), build(cfg.optim, global_batch_size=8), precision=build(cfg.precision),
        device=torch.device("cuda", 0), first=models.first_weights(cfg), cuda_graphs=graphs, compile="auto",
        micro_batch_size=cfg.train.micro_batch_size or 8, max_grad_norm=cfg.train.max_grad_norm,
    )  # fmt: skip
    return strategy


def batch_of(step: int, size: int = 8) -> tuple[Tensor, Tensor]:
    drawn = torch.randint(256, (size, 65), generator=torch.Generator().manual_seed(step))
    return drawn[:, :-1].cuda(), drawn[:, 1:].cuda()


def losses_of(strategy: Strategy, steps: int = 17) -> list[Any]:
    """Rates that change, an evaluation, a batch of another size and a step that is not finite among them."""
    from dtrain.worker import seed_everything

    found: list[Any] = []
    torch._dynamo.reset()  # else the second strategy would begin with the graphs of the first, for any batch size
    for step in range(steps):
        strategy.set_lr((step + 1) / steps)
        seed_everything(0, step, 0)
        if step == 12:
            found.append(strategy.eval_step(*batch_of(100)).item())
        if step == 14:  # a weight that is not finite for one step
            weight = next(strategy.module.parameters())
            kept = weight.detach().clone()
            with torch.no_grad():
                weight.fill_(float("nan"))
        result: Any = strategy.train_step(*batch_of(step, 4 if step == 13 else 8)).read()
        if step == 14:
            assert not result.updated
            with torch.no_grad():
                weight.copy_(kept)
            continue
        assert result.updated
        found.append((result.loss.hex(), result.grad_norm.hex()))
    return [*found, *(local(p).detach().double().sum().item() for p in strategy.module.parameters())]


@pytest.mark.parametrize(
    "words", ["strategy=fsdp", "model.dropout=0.1", "train.micro_batch_size=4 train.max_grad_norm=null"]
)
def test_the_same_bits_as_kernel_by_kernel(world: Any, words: str) -> None:
    torch.use_deterministic_algorithms(True)
    try:
        with torch._dynamo.config.patch(automatic_dynamic_shapes=False):
            recorded, usual = strategy_of("auto", *words.split()), strategy_of("none", *words.split())
            assert losses_of(recorded) == losses_of(usual)
        assert recorded.recorded is not None and recorded.recorded.graph is not None and usual.recorded is None
    finally:
        torch.use_deterministic_algorithms(False)


def test_what_cannot_be_recorded_is_launched_as_before(world: Any, caplog: pytest.LogCaptureFixture) -> None:
    strategy = strategy_of("auto", "model.dropout=0.1")
    whole = strategy.forward_backward

    def looks(inputs: Tensor, targets: Tensor) -> Tensor:
        loss = whole(inputs, targets)
        loss.item()  # waits for the GPU
        return loss

    strategy.forward_backward = looks  # type: ignore[method-assign]
    losses = [strategy.train_step(*batch_of(0)).read().loss for _ in range(STEPS_BEFORE + 3)]
    assert losses[-1] < losses[0] - 0.05
    assert "could not be recorded" in caplog.text and caplog.text.count("cuda_graphs") == 1
    assert torch.cuda.current_stream() == torch.cuda.default_stream()
    torch.cuda.empty_cache()  # which torch refuses while its allocator thinks that something is recorded
    torch.rand(1, device="cuda")


def test_a_gpu_that_does_not_wait_for_python_is_left_alone(world: Any) -> None:
    strategy = strategy_of("auto")
    batches = [batch_of(step) for step in range(STEPS_BEFORE + 2)]
    for batch in batches[:-5]:
        strategy.train_step(*batch).read()
    torch.cuda._sleep(4_000_000_000)  # two seconds of work
    for batch in batches[-5:]:
        strategy.train_step(*batch)
    assert strategy.recorded is not None and strategy.recorded.graph is None


def test_a_profiled_step_is_launched_kernel_by_kernel(world: Any) -> None:
    strategy = strategy_of("auto")
    strategy.is_watched = True
    for step in range(STEPS_BEFORE + 2):
        strategy.train_step(*batch_of(step)).read()
    assert strategy.recorded is not None and strategy.recorded.graph is None
