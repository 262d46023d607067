"""Silent corruption is found before it is saved: passes that run twice, and memory that must not change by itself."""

from __future__ import annotations

import json
import os
import re
import socket
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from dtrain.commands.verify.world import World
from dtrain.strategies.base import Strategy
from dtrain.strategies.replicas import held_tensors
from dtrain.train.guard import CorruptionError, Guard
from dtrain.train.process import seed_everything
from dtrain.util.dtensor import local
from tests.models.test_resnet import TINY
from tests.models.vision import make_run as make_pictures
from tests.strategies.test_replicas import batch, flip, is_last_rank, notes, saved, set_up
from tests.world import losses, make_run, spawn, start_server, summary, train

# model.dropout: the second pass must draw the same numbers
LAYOUTS: list[tuple[str, list[str]]] = [
    ("ddp", ["model.dropout=0.1"]),
    ("fsdp", ["model.dropout=0.1"]),
    ("fsdp", ["strategy.sharding=grad_op", "activation_checkpointing=full"]),
    ("tensor", ["strategy.tp=2", "strategy.sequence_parallel=true"]),
    ("pipeline", ["strategy.pp=2"]),
    ("fairscale", []),
    ("fairscale", ["strategy.mode=oss"]),
    ("local_sgd", ["strategy.every=2"]),
    ("ps", []),
]
MORE: list[tuple[str, list[str]]] = [
    ("ddp", ["precision=fp16", "lora.rank=2"]),
    ("ddp", ["precision=bf16"]),
    ("tensor", ["strategy.tp=2", "strategy.loss_parallel=true"]),
    ("pipeline", ["strategy.pp=2", "strategy.schedule=zbv", "model.num_layers=4"]),
    ("fsdp", ["strategy.offload=cpu"]),
]


def trained(run_dir: Path, replicas_every: int, replay_every: int) -> tuple[list[Any], dict[str, Tensor], Any]:
    """Some steps: their results, what the rank then holds, and the state of torch's generator."""
    strategy = set_up(run_dir)
    guard, results = Guard(strategy, replicas_every, replay_every), []
    for step in range(1, 5):
        strategy.set_lr(1.0)
        seed_everything(7, step, strategy.random_rank)
        guard.before_step(step)
        results.append(strategy.train_step(*batch(strategy, step)).read())
        guard.after_step(step)
    held = {name: local(tensor).clone() for name, tensor in held_tensors(strategy, None).items()}
    return results, held, torch.get_rng_state()


def check_that_nothing_changes(run_dirs: list[Path]) -> None:
    for run_dir in run_dirs:
        plain, plain_held, plain_random = trained(run_dir, 0, 0)
        for every in ((1, 1), (2, 0), (0, 3)):
            results, held, random = trained(run_dir, *every)
            assert results == plain, (run_dir.name, every)
            assert torch.equal(random, plain_random), (run_dir.name, every)
            assert held.keys() == plain_held.keys()
            for name, tensor in held.items():
                assert torch.equal(tensor, plain_held[name]), (run_dir.name, every, name)


@pytest.mark.parametrize("layouts", [LAYOUTS, pytest.param(MORE, marks=pytest.mark.slow)], ids=["usual", "more"])
def test_the_checks_change_no_bit(layouts: list[tuple[str, list[str]]], tmp_path: Path) -> None:
    options = ["cluster.processes=2", "model.num_layers=2"]
    runs = [
        make_run(tmp_path / f"{i}-{strategy}", f"strategy={strategy}", *options, *overrides)
        for i, (strategy, overrides) in enumerate(layouts)
    ]
    spawn(2, check_that_nothing_changes, runs)


def test_the_same_run_with_batch_norm_and_accumulation(tmp_path: Path) -> None:
    options = [*TINY, "train.micro_batch_size=2", "train.stop_after=4", "checkpoint.every=2"]
    runs = [make_pictures(tmp_path / f"{every}", *options, f"guard.replay_every={every}") for every in (0, 1)]
    for run in runs:
        assert train(run, 2) == [0, 0]
    assert losses(runs[0]) == losses(runs[1])
    assert summary(runs[0])["weights_sha256"] == summary(runs[1])["weights_sha256"], "with the running statistics"


# ---- faults --------------------------------------------------------------------------------------------------

NAME = "layers.1.mlp.up.weight"


def flip_once(gradient: Tensor, flipped: list[int]) -> Tensor:
    if flipped:
        return gradient
    flipped.append(1)
    changed = gradient.clone()
    changed.reshape(-1).view(torch.int32)[5] ^= 1 << 20
    return changed


def fails(strategy: Strategy, guard: Guard, step: int, expected: str) -> None:
    """All ranks raise the same message, and nothing is updated."""
    before = {name: local(tensor).clone() for name, tensor in held_tensors(strategy, None).items()}
    guard.before_step(step)
    with pytest.raises(CorruptionError) as found:
        strategy.train_step(*batch(strategy, step))
    assert re.search(expected, str(found.value)), str(found.value)
    for name, tensor in held_tensors(strategy, None).items():
        assert torch.equal(local(tensor), before[name]), name
    strategy.optimizer.zero_grad(set_to_none=True)


def find_faults(run_dirs: dict[str, Path]) -> None:
    who = rf"rank 1 \({re.escape(socket.gethostname())}\)"
    # ddp: one rank's own gradient, before it is averaged; all ranks then have the same wrong mean
    strategy = set_up(run_dirs["ddp"])
    guard = Guard(strategy, 0, 1)
    strategy.train_step(*batch(strategy, 1))  # the first one has a pass before it, which settles ddp's buckets
    flipped: list[int] = []
    if is_last_rank():
        parameter = dict(strategy.module.named_parameters())[NAME]
        parameter.register_hook(lambda gradient: flip_once(gradient, flipped))
    fails(strategy, guard, 3, rf"^step 3: {who} computed gradient of {NAME} twice, with different bits")
    guard.before_step(3)  # the second time there is no fault
    assert strategy.train_step(*batch(strategy, 3)).read().updated

    # fsdp: a shard of the summed gradient, and a shard of a weight between two updates
    strategy = set_up(run_dirs["fsdp"])
    guard = Guard(strategy, 2, 5)
    forward_backward, passes = strategy.forward_backward, []

    def faulty(inputs: Tensor, targets: Tensor) -> Tensor:
        loss = forward_backward(inputs, targets)
        passes.append(1)
        if is_last_rank() and len(passes) == 1:
            gradient = local(dict(strategy.module.named_parameters())[NAME].grad)  # type: ignore[arg-type]
            gradient.view(-1).view(torch.int32)[0] ^= 1
        return loss

    strategy.forward_backward = faulty  # type: ignore[method-assign]
    fails(strategy, guard, 5, rf"^step 5: {who} computed gradient of {NAME} twice")
    strategy.forward_backward = forward_backward  # type: ignore[method-assign]
    for step in (5, 6, 7):
        guard.before_step(step)
        strategy.train_step(*batch(strategy, step))
        guard.after_step(step)
    flip(strategy, f"optim.{NAME}.exp_avg")
    guard.before_step(8)
    with pytest.raises(CorruptionError, match=rf"^step 8: {who} held optim.{NAME}.exp_avg, which changed in memory"):
        strategy.train_step(*batch(strategy, 8))

    # zero1: a master weight
    zero: Any = set_up(run_dirs["zero1"])
    guard = Guard(zero, 2, 0)
    guard.before_step(1)
    zero.train_step(*batch(zero, 1))
    guard.after_step(1)
    held = [(name, chunks[0].values) for name, chunks in zero.masters.walk() if chunks and chunks[0].values.numel()]
    name, values = held[0]
    if is_last_rank():
        values.view(-1).view(torch.int32)[0] ^= 1 << 3
    names: list[Any] = [None, None]
    dist.all_gather_object(names, name)
    guard.before_step(2)
    with pytest.raises(CorruptionError, match=rf"^step 2: {who} held {names[1]} \(master 0\), which changed"):
        zero.train_step(*batch(zero, 2))


def test_a_fault_names_its_rank_and_tensor_before_the_update(tmp_path: Path) -> None:
    options = ["cluster.processes=2", "model.num_layers=2"]
    strategies = ("ddp", "fsdp", "zero1")
    spawn(2, find_faults, {s: make_run(tmp_path / s, f"strategy={s}", *options) for s in strategies})


def faulty_rank(run_dir: Path) -> int:
    """In step 5 the last rank's first pass has another bit in a gradient."""
    from dtrain.train import loop, process

    process.redirect_output(run_dir, int(os.environ["RANK"]))
    passes: list[int] = []

    def forward_backward(self: Any, inputs: Tensor, targets: Tensor) -> Tensor:
        passes.append(1)
        if len(passes) == 1:
            parameter = dict(self.module.named_parameters())[NAME]
            parameter.register_hook(fault)
        return before(self, inputs, targets)  # type: ignore[no-any-return]

    def fault(gradient: Tensor) -> Tensor:
        return flip_once(gradient, []) if len(passes) == 2 * 5 - 1 and is_last_rank() else gradient

    before: Any = Strategy.forward_backward
    Strategy.forward_backward = forward_backward  # type: ignore[method-assign]
    return loop.main(run_dir)


def test_a_run_stops_before_the_next_save(tmp_path: Path) -> None:
    start_server()
    options = ["train.steps=8", "checkpoint.every=1", "checkpoint.keep=99", "cluster.processes=2"]
    run = make_run(tmp_path / "run", *options, "guard.replay_every=1")
    assert World(2, faulty_rank, run).join() == [3, 3]
    assert {note["type"] for note in notes(run)} == {"CorruptionError"}
    (message,) = {note["message"] for note in notes(run)}
    assert message.startswith(f"step 5: rank 1 ({socket.gethostname()}) computed gradient of {NAME} twice")
    assert saved(run)[-1] == "step-00000004"
    assert json.loads((run / "checkpoints" / "step-00000004" / "manifest.json").read_text())["step"] == 4


def test_a_model_that_changes_its_weights_in_its_forward_pass_is_not_accused(tmp_path: Path) -> None:
    settings = ["model._target_=tests.train.moving_model.Moving", "trust=[tests]", "train.steps=6"]
    plain, checked = tmp_path / "plain", tmp_path / "checked"
    for folder, more in ((plain, []), (checked, ["guard.replicas_every=1", "guard.replay_every=2"])):
        assert train(make_run(folder, *settings, *more), 1, {"DTRAIN_TRUST": "tests"}) == [0]
    assert losses(plain) == losses(checked)
