"""Replicas agree, or the run stops: one decision to update, and checksums that find a bit which one rank flipped."""

from __future__ import annotations

import json
import os
import random
import socket
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from dtrain.checkpoint import integrity, store
from dtrain.checkpoint.initial_weights import Drawn
from dtrain.commands.verify.world import World
from dtrain.config.build import build
from dtrain.config.run_file import load
from dtrain.strategies import base
from dtrain.strategies.base import Strategy
from dtrain.strategies.checksums import checksums
from dtrain.strategies.replicas import ReplicaError, Replicas, held_tensors
from dtrain.util.dtensor import local
from tests.world import make_run, spawn, start_server, summary

NAN = float("nan")
ROW = 4096


def checksum(tensor: torch.Tensor) -> int:
    """Beside others, as tensors are summed together."""
    others = [torch.ones(3), torch.arange(ROW + 9.0), torch.zeros(0, dtype=tensor.dtype)]
    return int(checksums([others[0], tensor, *others[1:]], torch.device("cpu"))[1])


# ---- the checksum --------------------------------------------------------------------------------------------

DTYPES = (torch.float32, torch.bfloat16, torch.int64, torch.uint8)


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_flipped_bit_and_every_swap_changes_the_checksum(dtype: torch.dtype) -> None:
    draw = random.Random(0)
    for shape in [(), (5,), (3, 7), (ROW + 1,), (17, ROW - 3)]:
        tensor = (torch.randn(shape, generator=torch.Generator().manual_seed(1)) * 50).to(dtype)
        raw = tensor.reshape(-1).view(torch.uint8)
        size, before = tensor.element_size(), int(checksum(tensor))
        assert int(checksum(tensor.clone())) == before
        for bit in {0, 8 * len(raw) - 1, *(draw.randrange(8 * len(raw)) for _ in range(12))}:
            raw[bit // 8] ^= 1 << bit % 8
            assert int(checksum(tensor)) != before, (shape, bit)
            raw[bit // 8] ^= 1 << bit % 8
        elements = raw.view(-1, size)
        for _ in range(12):  # two values swapped, and two signs flipped
            a, b = draw.randrange(len(elements)), draw.randrange(len(elements))
            if a != b and not torch.equal(elements[a], elements[b]):
                elements[[a, b]] = elements[[b, a]]
                assert int(checksum(tensor)) != before, (shape, a, b)
                elements[[a, b]] = elements[[b, a]]
            if a != b:
                elements[[a, b], size - 1] ^= 128
                assert int(checksum(tensor)) != before, (shape, a, b)
                elements[[a, b], size - 1] ^= 128
        assert int(checksum(tensor)) == before


def test_a_checksum_is_of_the_values_in_their_order_and_not_of_the_memory() -> None:
    matrix = torch.randn(40, 300)
    assert checksum(matrix) == checksum(matrix.t().contiguous().t())
    assert checksum(matrix) != checksum(matrix.t()) and checksum(torch.empty(0)) == 0
    rows = matrix[torch.randperm(40, generator=torch.Generator().manual_seed(1))]
    assert checksum(rows) != checksum(matrix) and checksum(-matrix) != checksum(matrix)
    assert checksum(torch.zeros(3)) != checksum(torch.tensor([0.0, -0.0, 0.0])), "the sign of a zero is a bit, too"


# ---- on ranks of one process group ---------------------------------------------------------------------------

# strategy, overrides, and whom a flipped bit on the last of 4 ranks is blamed on: (name of a tensor, ranks). Two ranks
# that hold a tensor cannot tell which of them is right.
Layout = tuple[str, list[str], list[tuple[str, list[int]]]]
LAYOUTS: list[Layout] = [
    ("ddp", [], [("model.layers.1.mlp.up.weight", [3]), ("optim.embed.weight.exp_avg_sq", [3])]),
    ("ddp", ["precision=fp16", "lora.rank=2"], [("model.layers.0.attention.qkv.weight", [3])]),
    ("fsdp", ["strategy.sharding=hybrid", "strategy.replica_size=2"], [("model.embed.weight", [1, 3])]),
    (
        "tensor",
        ["strategy.tp=2", "strategy.data=ddp"],
        [("model.layers.0.attention.qkv.weight", [1, 3]), ("model.norm.weight", [3])],
    ),
    # the embedding is also the head, on the other stage
    (
        "pipeline",
        ["strategy.pp=2", "strategy.data=ddp"],
        [("model.norm.weight", [2, 3]), ("model.embed.weight", [3])],
    ),
    ("fairscale", [], [("model.layers.1.mlp.up.weight", [3])]),
    ("zero1", [], [("model.layers.1.mlp.up.weight", [3])]),
    ("local_sgd", ["strategy.every=2"], [("model.layers.1.mlp.up.weight", [3])]),
    ("ps", [], [("model.layers.1.mlp.up.weight", [3])]),
]
MORE: list[Layout] = [
    ("3d", [], [("model.norm.weight", [2, 3]), ("model.embed.weight", [3])]),
    ("fsdp", [], []),
    ("tensor", ["strategy.tp=2"], [("model.norm.weight", [2, 3]), ("optim.norm.bias.exp_avg", [2, 3])]),
    ("zero3", [], []),
    ("zero2", [], [("model.layers.1.mlp.up.weight", [3])]),
    ("fairscale", ["strategy.mode=oss"], [("model.layers.1.mlp.up.weight", [3])]),
    ("3d", ["strategy.tp=1", "strategy.dp=2", "strategy.schedule=zbv", "model.num_layers=4"], []),
]


def set_up(run_dir: Path) -> Strategy:
    from dtrain.train import build as models

    cfg = load(run_dir)
    strategy: Strategy = build(cfg.strategy)
    common: dict[str, Any] = {"precision": build(cfg.precision), "device": torch.device("cpu"), "first": Drawn(5)}
    strategy.setup(models.make(cfg), build(cfg.optim), **common, micro_batch_size=1, max_grad_norm=1.0)
    return strategy


def batch(strategy: Strategy, step: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(100 * step + strategy.data_rank)
    tokens = torch.randint(0, 61, (2, 17), generator=generator)
    return tokens[:, :-1], tokens[:, 1:]


def is_last_rank() -> bool:
    return dist.get_rank() == dist.get_world_size() - 1


def poison(strategy: Any, where: str, loss: Tensor) -> Tensor:
    """On the last rank: a loss or a gradient that is NaN, when all sums over ranks have been made."""
    if not is_last_rank():
        return loss
    if where == "loss":
        return loss * NAN
    if hasattr(strategy, "zero"):
        strategy.zero.averaged_gradients[0][0].view(-1)[0] = NAN
    else:
        held = getattr(strategy, "owned", strategy.module.parameters())
        local(next(p.grad for p in held if p.grad is not None and local(p.grad).numel())).view(-1)[0] = NAN
    return loss


def flip(strategy: Strategy, name: str) -> None:
    """One bit of one element on the last rank; the same call again mends it."""
    if is_last_rank():
        local(held_tensors(strategy, None)[name]).reshape(-1).view(torch.int32)[-1] ^= 1 << 11


def skips_on_all_ranks(strategy: Any, where: str) -> None:
    update = strategy.update
    strategy.update = lambda loss: update(poison(strategy, where, loss))
    before = {name: local(t).clone() for name, t in held_tensors(strategy, None).items()}
    result = strategy.train_step(*batch(strategy, 3)).read()
    strategy.update = update
    assert not result.updated and result.overflow == (where == "gradient" and strategy.precision.scaled)
    for name, tensor in held_tensors(strategy, None).items():
        assert name == "precision.scale" or torch.equal(local(tensor), before[name]), name


def keeps_the_bits_of_a_loss() -> None:
    """The flag beside the loss in its all-reduce does not change the order in which the ranks' losses are summed."""
    generator = torch.Generator().manual_seed(dist.get_rank())
    for loss in torch.randn(50, generator=generator):
        alone, beside = loss.clone(), torch.stack([loss, torch.zeros(())])
        dist.all_reduce(alone)
        dist.all_reduce(beside)
        assert torch.equal(alone, beside[0])


def agree_in_each_layout(runs: list[tuple[Path, list[tuple[str, list[int]]]]]) -> None:
    keeps_the_bits_of_a_loss()
    for run_dir, flips in runs:
        strategy = set_up(run_dir)
        replicas = Replicas(strategy)
        for step in (1, 2):
            assert strategy.train_step(*batch(strategy, step)).read().updated
        replicas.check(2)
        replicas.check(2, strategy.state_dict())
        for name, blamed in flips:
            flip(strategy, name)
            with pytest.raises(ReplicaError) as found:
                replicas.check(2)
            expected = [f"rank {rank} ({socket.gethostname()})" for rank in blamed]
            assert f"step 2: {' and '.join(expected)} differ" in str(found.value), (run_dir.name, str(found.value))
            assert f" in {name}. " in str(found.value), (run_dir.name, str(found.value))
            flip(strategy, name)
            replicas.check(2)
        for where in ("gradient", "loss"):
            if where == "gradient" or not hasattr(strategy, "zero"):  # which takes a NaN loss from its own gradient
                skips_on_all_ranks(strategy, where)
        assert strategy.train_step(*batch(strategy, 4)).read().updated
        replicas.check(3)
        replicas.check(3, strategy.state_dict())


@pytest.mark.parametrize("layouts", [LAYOUTS, pytest.param(MORE, marks=pytest.mark.slow)], ids=["usual", "more"])
def test_ranks_skip_together_and_a_flipped_bit_is_found(layouts: list[Layout], tmp_path: Path) -> None:
    runs = []
    for i, (strategy, overrides, flips) in enumerate(layouts):
        words = [f"strategy={strategy}", "cluster.processes=4", "model.num_layers=2", *overrides]
        runs.append((make_run(tmp_path / f"{i}-{strategy}", *words), flips))
    spawn(4, agree_in_each_layout, runs)


# ---- runs ----------------------------------------------------------------------------------------------------


def faulty_rank(run_dir: Path, fault: str, on_device: bool = False) -> int:
    """Train; at step 5 the last rank has a NaN, a flipped bit, or misses the update that the others make."""
    from dtrain.train import loop, process

    process.redirect_output(run_dir, int(os.environ["RANK"]))
    steps: list[int] = []

    def update(self: Any, loss: Tensor) -> Any:
        steps.append(1)
        if len(steps) != 5:
            return before(self, loss)
        weights = [p.detach().clone() for p in self.module.parameters()]
        result = before(self, poison(self, fault, loss) if fault == "gradient" else loss)
        if fault == "missed" and is_last_rank():
            for p, w in zip(self.module.parameters(), weights, strict=True):
                p.data.copy_(w)
        if fault in ("model.norm.weight", "optim.norm.weight.exp_avg"):
            flip(self, fault)
        return result

    patched: Any = base
    before: Any = Strategy.update
    patched.Strategy.update = update
    if on_device:  # as on a GPU, where the host does not wait for the decision
        patched.Strategy.decides_on_device = lambda self: True
        patched.LateResult = lambda figures: base.StepResult(*figures.tolist()[:2], updated=bool(figures[2]))
    return loop.main(run_dir)


OPTIONS = ["train.steps=8", "checkpoint.every=2", "checkpoint.keep=99", "cluster.processes=2", "model.num_layers=1"]


def run_with(fault: str, run_dir: Path, *overrides: str, on_device: bool = False) -> tuple[Path, list[int | None]]:
    start_server()
    run = make_run(run_dir, *OPTIONS, *overrides)
    return run, World(2, faulty_rank, run, fault, on_device).join()


def notes(run: Path) -> list[dict[str, Any]]:
    return [json.loads((run / "logs" / f"failure-{rank}.json").read_text()) for rank in (0, 1)]


def saved(run: Path) -> list[str]:
    return sorted(path.name for path in (run / "checkpoints").glob("step-*"))


@pytest.mark.parametrize("on_device", [False, True])
def test_a_nan_on_one_rank_is_skipped_by_all(on_device: bool, tmp_path: Path) -> None:
    run, codes = run_with("gradient", tmp_path / "run", "train.nonfinite=skip", on_device=on_device)
    assert codes == [0, 0] and summary(run)["status"] == "done" and summary(run)["skipped_steps"] == 1
    logs = [(run / "logs" / f"rank-{rank}.log").read_text() for rank in (0, 1)]
    assert [log.count("weights unchanged") for log in logs] == [1, 1]
    counts = store.read_manifest(run / "checkpoints" / "step-00000008")["extra"]["optimizer"]
    assert {count["step"] for count in counts.values()} == {7}


def test_or_stops_all(tmp_path: Path) -> None:
    run, codes = run_with("gradient", tmp_path / "run")
    assert codes == [3, 3] and [note["type"] for note in notes(run)] == ["NonFiniteError"] * 2
    assert saved(run) == ["step-00000002", "step-00000004"]


@pytest.mark.parametrize(
    ("fault", "every", "step"), [("model.norm.weight", 0, 6), ("optim.norm.weight.exp_avg", 1, 5), ("missed", 1, 5)]
)
def test_replicas_that_differ_are_never_saved(fault: str, every: int, step: int, tmp_path: Path) -> None:
    run, codes = run_with(fault, tmp_path / "run", f"guard.replicas_every={every}")
    assert codes == [3, 3] and [note["type"] for note in notes(run)] == ["ReplicaError"] * 2
    (message,) = {note["message"] for note in notes(run)}
    assert message.startswith(
        f"step {step}: rank 0 ({socket.gethostname()}) and rank 1 ({socket.gethostname()}) differ"
    )
    assert "resume" in message and (fault == "missed" or fault in message)
    assert saved(run) == ["step-00000002", "step-00000004"]
    assert not integrity.verify(run / "checkpoints" / "step-00000004"), "the older one is whole"
