"""A step that is one launch has the bits of one that is launched kernel by kernel."""

from __future__ import annotations

import os
from types import SimpleNamespace
from typing import Any, Literal

import pytest
import torch
from torch import Tensor

from dtrain.models.layers import IGNORED
from dtrain.optim.adamw import AdamW
from dtrain.strategies.base import Strategy
from dtrain.strategies.cuda_graph import NUMBER, STEPS_WATCHED, RecordedStep
from dtrain.strategies.ddp import DDP
from dtrain.util.dtensor import local

# ---- which steps are recorded: no GPU is needed to decide that --------------------------------------------------


class Clock:
    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 0.0
        monkeypatch.setattr("dtrain.strategies.cuda_graph.time.perf_counter", lambda: self.now)


def recorded_at(clock: Clock, has_ended: Any, launch_s: float = 1.0, between_s: float = 0.0) -> list[int]:
    """Numbers of the steps that would be recorded. has_ended: of a step, whether the one before it has by then."""
    step, found = RecordedStep(lambda *_: torch.empty(0), None, torch.device("cpu")), []
    step.record = lambda *_: bool(found.append(number))  # type: ignore[func-returns-value, method-assign]
    for number in range(1, 3 * NUMBER):
        clock.now += between_s
        assert step(torch.empty(0), torch.empty(0)) is None
        clock.now += launch_s
        step.watch(SimpleNamespace(query=lambda n=number: has_ended(n + 1)))  # type: ignore[arg-type]
    return found


def test_a_step_is_recorded_where_python_is_the_slower_one(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch)
    assert recorded_at(clock, lambda _: True) == [NUMBER]
    assert recorded_at(clock, lambda _: False) == []
    assert recorded_at(clock, lambda n: n >= NUMBER - STEPS_WATCHED) == [NUMBER]
    for busy in range(NUMBER - STEPS_WATCHED, NUMBER):
        assert recorded_at(clock, lambda n, busy=busy: n != busy) == []
    assert recorded_at(clock, lambda _: True, between_s=0.9) == [NUMBER]
    assert recorded_at(clock, lambda _: True, between_s=1.1) == []  # data, an evaluation or a save is waited for


def decided(strategy: Strategy, **changes: Any) -> bool:
    from dtrain.models.gpt2 import GPT2

    with torch.device("meta"):
        module: Any = GPT2(1, 16, 1, 16, 8)
    strategy.device, strategy.precision = torch.device("cuda"), SimpleNamespace(scaled=False)  # type: ignore[assignment]
    strategy.compile, strategy.masked = "whole", False
    strategy.model = strategy.module = module
    strategy.optimizer = AdamW(module.parameters())
    for name, value in changes.items():
        setattr(strategy, name, value)
    return strategy.can_be_recorded()


def test_what_is_not_ours_is_not_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    """It may count, or draw from Python's random numbers."""

    class Counting(Strategy):
        def norm(self, parameters: list[Any]) -> Tensor:
            return super().norm(parameters)

    class Averaging(AdamW):
        pass

    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 1)
    assert decided(DDP()) and decided(Strategy())
    assert not decided(Counting())
    assert not decided(DDP(), optimizer=Averaging([torch.zeros(1)]))
    assert not decided(DDP(), module=torch.nn.Linear(1, 1))
    assert not decided(DDP(), model=torch.nn.Linear(1, 1))
    assert not decided(DDP(), compile="none") and not decided(DDP(), masked=True)
    assert not decided(DDP(), precision=SimpleNamespace(scaled=True))
    assert not decided(DDP(), device=torch.device("cpu"))
    with_loss = DDP()
    assert decided(with_loss)
    with_loss.module.forward = lambda *_: None  # type: ignore[method-assign]
    assert not with_loss.can_be_recorded()
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 2)
    assert not decided(DDP())


# ---- on a GPU -----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Any:
    import torch.distributed as dist

    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # or torch refuses to be deterministic
    store = tmp_path_factory.mktemp("world") / "store"
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def strategy_of(graphs: Literal["auto", "none"], *words: str) -> Strategy:
    from dtrain.config.build import build
    from dtrain.config.run_file import Settings
    from dtrain.launch.compose import compose
    from dtrain.train import build as models

    torch.cuda.reset_peak_memory_stats()  # of other tests: what a step takes is asked for
    sizes = ["model.num_layers=2", "model.dim=128", "model.num_heads=2", "model.seq_len=64"]
    model = [] if any(word.startswith("model=") for word in words) else ["model=gpt2-tiny", *sizes]
    cfg = Settings(compose(["precision=bf16", "cluster.processes=1", *model, *words]))
    strategy: Strategy = build(cfg.strategy).for_world(1)
    strategy.resolve_mesh(1, 1)
    module = models.make(cfg)
    if hasattr(module, "num_targets"):
        module.num_targets = NUM_MASKED  # type: ignore[assignment]
    strategy.setup(
        module, build(cfg.optim, global_batch_size=8), precision=build(cfg.precision),
        device=torch.device("cuda", 0), first=models.first_weights(cfg), cuda_graphs=graphs, compile=cfg.compile,
        micro_batch_size=cfg.train.micro_batch_size or 8, max_grad_norm=cfg.train.max_grad_norm,
        activation_checkpointing=cfg.activation_checkpointing,
    )  # fmt: skip
    return strategy


NUM_MASKED = 9  # of each sample


def batch_of(step: int, size: int = 8, kind: str = "text") -> tuple[Tensor, Tensor]:
    drawn = torch.randint(256, (size, 65), generator=torch.Generator().manual_seed(step))
    if kind == "masked":
        targets = torch.full((size, 64), IGNORED)
        targets[:, step % 7 :: 7][:, :NUM_MASKED] = drawn[:, step % 7 : 64 : 7][:, :NUM_MASKED]
        return drawn[:, :-1].cuda(), targets.cuda()
    if kind == "pictures":
        return drawn[:, None, None, :32].expand(size, 3, 32, 32).float().cuda() / 256, drawn[:, 64].cuda() % 10
    return drawn[:, :-1].cuda(), drawn[:, 1:].cuda()


def losses_of(strategy: Strategy, steps: int = 17, kind: str = "text") -> list[Any]:
    """Rates that change, an evaluation, a batch of another size and a step that is not finite among them."""
    from dtrain.train.process import seed_everything

    found: list[Any] = []
    torch._dynamo.reset()  # else the second strategy would begin with the graphs of the first, for any batch size
    for step in range(steps):
        strategy.set_lr((step + 1) / steps)
        seed_everything(0, step, 0)
        if step == 12:
            found.append(strategy.eval_step(*batch_of(100, 8, kind)).tolist())
        if step == 14:  # a weight that is not finite for one step
            weight = next(strategy.module.parameters())
            kept = weight.detach().clone()
            with torch.no_grad():
                weight.fill_(float("nan"))
        result: Any = strategy.train_step(*batch_of(step, 4 if step == 13 else 8, kind)).read()
        if step == 14:
            assert not result.updated
            with torch.no_grad():
                weight.copy_(kept)
            continue
        assert result.updated
        found.append((result.loss.hex(), result.grad_norm.hex()))
    return [*found, *(local(t).tolist() for t in strategy.module.state_dict().values())]


@pytest.mark.gpu
@pytest.mark.parametrize(
    "words",
    [
        "strategy=fsdp model.dropout=0.1",
        "train.micro_batch_size=4 train.max_grad_norm=null compile=blocks",
        "lora.rank=4 activation_checkpointing=ops",
        "precision=bf16-pure activation_checkpointing=full",
        "model=resnet18 model.image_size=32 model.num_classes=10 model.width=16",
        "model=bert-tiny data=stdlib-mlm model.seq_len=64 model.dropout=0.1",
    ],
)
def test_the_same_bits_as_kernel_by_kernel(world: Any, words: str) -> None:
    torch.use_deterministic_algorithms(True)
    try:
        with torch._dynamo.config.patch(automatic_dynamic_shapes=False):
            recorded, usual = strategy_of("auto", *words.split()), strategy_of("none", *words.split())
            kind = "pictures" if "resnet" in words else "masked" if "bert" in words else "text"
            assert losses_of(recorded, kind=kind) == losses_of(usual, kind=kind)
        assert recorded.is_captured and usual.recorded is None
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("words", "kind"),
    [("compile=none", "text"), ("model=bert-tiny data=stdlib-mlm model.seq_len=64 compile=none", "masked"),
     ("model=bert-tiny data=stdlib-mlm model.seq_len=64", "masked")],
)  # fmt: skip
def test_no_step_waits_for_the_gpu(world: Any, words: str, kind: str) -> None:
    strategy, batches = strategy_of("none", *words.split()), [batch_of(step, 8, kind) for step in range(6)]
    for inputs, targets in batches[:5]:  # compiles, times GEMMs, allocates
        strategy.train_step(inputs, targets).read()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        result = strategy.train_step(*batches[5])
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert result.read().updated


@pytest.mark.gpu
def test_what_cannot_be_recorded_is_launched_as_before(world: Any, caplog: pytest.LogCaptureFixture) -> None:
    strategy = strategy_of("auto", "model.dropout=0.1")
    whole = strategy.forward_backward

    def looks(inputs: Tensor, targets: Tensor) -> Tensor:
        loss = whole(inputs, targets)
        loss.item()  # waits for the GPU
        return loss

    strategy.forward_backward = looks  # type: ignore[method-assign]
    losses = [strategy.train_step(*batch_of(0)).read().loss for _ in range(NUMBER + 3)]
    assert losses[-1] < losses[0] - 0.05
    assert "could not be captured" in caplog.text and caplog.text.count("cuda_graphs") == 1
    assert torch.cuda.current_stream() == torch.cuda.default_stream()
    torch.cuda.empty_cache()  # which torch refuses while its allocator thinks that something is recorded
    torch.rand(1, device="cuda")


@pytest.mark.gpu
def test_a_gpu_that_does_not_wait_for_python_is_left_alone(world: Any) -> None:
    strategy = strategy_of("auto")
    batches = [batch_of(step) for step in range(NUMBER + 2)]
    for batch in batches[:-5]:
        strategy.train_step(*batch).read()
    torch.cuda._sleep(4_000_000_000)  # two seconds of work
    for batch in batches[-5:]:
        strategy.train_step(*batch)
    assert strategy.recorded is not None and not strategy.is_captured


@pytest.mark.gpu
def test_a_profiled_step_is_launched_kernel_by_kernel(world: Any) -> None:
    strategy = strategy_of("auto")
    strategy.is_profiled = True
    for step in range(NUMBER + 2):
        strategy.train_step(*batch_of(step)).read()
    assert strategy.recorded is not None and not strategy.is_captured
