"""fsdp holds a share of everything, also between the micro-batches of a step."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from dtrain.checkpoint.initial_weights import Drawn
from dtrain.config.build import build
from dtrain.config.run_file import load
from dtrain.strategies.fsdp import FSDP
from dtrain.strategies.tensor import TensorParallel
from dtrain.util.dtensor import is_dtensor
from tests.world import make_run, spawn, summary, train


def set_up(run_dir: Path, kind: str) -> Any:
    cfg = load(run_dir)
    strategy: Any = TensorParallel(tp=1) if kind == "tensor" else FSDP(sharding=kind)  # type: ignore[arg-type]
    with torch.device("meta"):
        model = build(cfg.model)
    strategy.setup(
        model, build(cfg.optim), precision=build(cfg.precision), device=torch.device("cpu"), first=Drawn(5),
        micro_batch_size=1,
    )  # fmt: skip
    return strategy


def holds_its_share(run_dir: Path, kind: str, cut: bool) -> None:
    """After a pass that is not the last: is a gradient this rank's part, or the whole?"""
    strategy = set_up(run_dir, kind)
    tokens = torch.randint(0, 61, (1, 17), generator=torch.Generator().manual_seed(0))
    with strategy.no_sync(last=False):
        strategy.model(tokens[:, :-1], tokens[:, 1:]).backward()
    gradients = [p.grad for p in strategy.module.parameters() if p.grad is not None]
    assert bool(gradients) == cut, "whole gradients are fsdp's own, and not shown as a parameter's"
    for p in strategy.module.parameters():
        assert not cut or (is_dtensor(p.grad) and p.grad.to_local().shape == p.to_local().shape)


@pytest.mark.parametrize(("kind", "cut"), [("full", True), ("grad_op", False), ("tensor", True)])
def test_gradients_of_a_pass_are_cut_unless_whole_weights_stay(tmp_path: Path, kind: str, cut: bool) -> None:
    spawn(2, holds_its_share, make_run(tmp_path), kind, cut)


def keeps_the_ends(run_dir: Path, kind: str) -> None:
    strategy = set_up(run_dir, kind)
    tokens = torch.randint(0, 61, (1, 17), generator=torch.Generator().manual_seed(0))

    def whole() -> set[bool]:
        """Of the layers' weights and of the others: is any gathered?"""
        layers = {p for unit in strategy.module.fsdp_units() for p in unit.parameters()}
        return {p in layers for p in strategy.module.parameters() if not is_dtensor(p)}

    loss = strategy.model(tokens[:, :-1], tokens[:, 1:])
    assert whole() == {False}, "the backward pass begins with the ends"
    loss.backward()
    assert whole() == set()
    strategy.eval_step(tokens[:, :-1], tokens[:, 1:])
    assert whole() == set(), "a save would take them for the weights"


@pytest.mark.parametrize("kind", ["full", "tensor"])
def test_what_is_in_no_layer_stays_gathered_between_the_passes(tmp_path: Path, kind: str) -> None:
    spawn(2, keeps_the_ends, make_run(tmp_path), kind)


@pytest.mark.parametrize(
    ("words", "effective"),
    [
        (["strategy=fsdp"], "ddp"),
        (["strategy=fsdp", "strategy.offload=cpu"], "fsdp"),
        (["strategy=zero2"], "ddp"),
        (["strategy=zero1", "strategy.offload=cpu"], "zero1"),
        (["strategy=ddp"], "ddp"),
    ],
)
def test_one_rank_says_what_really_runs(words: list[str], effective: str, tmp_path: Path) -> None:
    run = make_run(tmp_path, *words, "cluster.processes=1", "train.steps=1")
    assert train(run, 1) == [0]
    said = "has nothing to shard: it runs as ddp" in (run / "logs" / "rank-0.log").read_text()
    assert summary(run)["effective_strategy"] == effective
    assert summary(run)["strategy"] == words[0].removeprefix("strategy=")
    assert said == (effective != summary(run)["strategy"])
