"""FairScale: who owns what, one norm over all owners, and that `oss` is as exact as `sharded_ddp`.

tests/parity has every strategy's default, which is sharded_ddp here.
"""

from __future__ import annotations

import math
import shutil
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

pytest.importorskip("fairscale", reason="pip install 'dtrain[fairscale]'")

from dtrain.checkpoint import store
from dtrain.checkpoint.initial_weights import Drawn
from dtrain.config.build import build
from dtrain.config.run_file import load
from dtrain.strategies.ddp import DDP
from dtrain.strategies.fairscale import FairScale
from tests.world import losses, make_run, metrics, spawn, summary, train

# ---- on ranks of one process group ---------------------------------------------------------------------------


def set_up(strategy: DDP, run_dir: Path, model: nn.Module | None = None) -> DDP:
    cfg = load(run_dir)
    if model is None:
        with torch.device("meta"):
            model = build(cfg.model)
    common: dict[str, Any] = {"precision": build(cfg.precision), "device": torch.device("cpu"), "first": Drawn(5)}
    strategy.setup(model, build(cfg.optim), **common, micro_batch_size=2, max_grad_norm=0.5)
    return strategy


def batch(step: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(100 * step + dist.get_rank())
    tokens = torch.randint(0, 61, (4, 17), generator=generator)
    return tokens[:, :-1], tokens[:, 1:]


def each_weight_has_one_owner(run_dir: Path, mode: Literal["oss", "sharded_ddp"]) -> None:
    strategy, ddp = (set_up(s, run_dir) for s in (FairScale(mode=mode), DDP()))
    named = dict(strategy.module.named_parameters())

    state = strategy.state_dict()  # before the first step, as a resume does
    assert {n for n in state if n.startswith("model.")} == {f"model.{n}" for n in named}
    owned = {n for n in named if f"optim.{n}.exp_avg" in state}
    owners = store.gather(sorted(owned))
    assert sorted(n for names in owners for n in names) == sorted(named), (
        "each weight's moments on one rank, and on one only"
    )
    sizes = [sum(named[n].numel() for n in names) for names in owners]
    assert max(sizes) - min(sizes) <= max(p.numel() for p in named.values())

    strategy.set_lr(0.5)
    ddp.set_lr(0.5)
    for step in range(4):
        strategy.eval_step(*batch(step))
        places = {n: p.data_ptr() for n, p in named.items()}
        result, expected = strategy.train_step(*batch(step)).read(), ddp.train_step(*batch(step)).read()
        assert abs(result.loss - expected.loss) < 1e-6 and abs(result.grad_norm - expected.grad_norm) < 1e-5
        assert result.grad_norm > 0.5, "the clipping must have something to clip"
        assert step == 0 or places == {n: p.data_ptr() for n, p in named.items()}, "evaluating must not move weights"
    for name, p in ddp.module.named_parameters():
        # 4 steps at a rate of 5e-4; where a gradient is near 0, Adam makes much of its rounding
        assert (named[name] - p).abs().max() < 1e-5, name

    strategy.model.train()
    strategy.forward_backward(*batch(9))
    held = {n for n, p in named.items() if p.grad is not None}
    assert held == (owned if mode == "sharded_ddp" else set(named)), "others' gradients are freed"
    strategy.optimizer.zero_grad(set_to_none=True)

    before = {n: t.clone() for n, t in strategy.state_dict().items() if isinstance(t, Tensor)}
    hooks = [p.register_hook(lambda g: g * math.nan) for p in list(named.values())[:1] if dist.get_rank() == 1]
    result = strategy.train_step(*batch(10)).read()
    for hook in hooks:
        hook.remove()
    assert not result.updated and not math.isfinite(result.grad_norm), "one rank's NaN is every rank's"
    assert all(torch.equal(t, before[n]) for n, t in strategy.state_dict().items() if isinstance(t, Tensor))
    assert strategy.train_step(*batch(11)).read().updated


@pytest.mark.parametrize("mode", ["oss", "sharded_ddp"])
def test_each_weight_has_one_owner(mode: str, tmp_path: Path) -> None:
    spawn(3, each_weight_has_one_owner, make_run(tmp_path, "optim.lr=1e-3"), mode)


class OneWeight(nn.Linear):
    def __init__(self) -> None:
        super().__init__(17, 17, bias=False, device="meta")

    def init_weights(self, name: str, weight: Tensor, generator: torch.Generator) -> None:
        weight.normal_(generator=generator)

    def forward(self, inputs: Tensor, targets: Tensor | None = None) -> Tensor:
        return super().forward(inputs).square().mean()


def more_ranks_than_weights(run_dir: Path, mode: Literal["oss", "sharded_ddp"]) -> None:
    strategy = set_up(FairScale(mode=mode), run_dir, OneWeight())
    assert len(strategy.state_dict()) == (3 if dist.get_rank() == 0 else 1)
    inputs = torch.ones(4, 17)
    assert strategy.train_step(inputs, inputs).read().loss > strategy.train_step(inputs, inputs).read().loss
    assert len(strategy.state_dict()) == (3 if dist.get_rank() == 0 else 1)
    assert strategy.extra_state()["optimizer"] == {"weight": {"step": 2.0}}
    assert len(set(store.gather(strategy.module.weight.sum().item()))) == 1


@pytest.mark.parametrize("mode", ["oss", "sharded_ddp"])
def test_a_rank_may_own_nothing(mode: str, tmp_path: Path) -> None:
    spawn(2, more_ranks_than_weights, make_run(tmp_path), mode)


# ---- runs ----------------------------------------------------------------------------------------------------


def run_oss(run_dir: Path, size: int, *options: str, mode: str = "oss") -> Path:
    fixed = ("strategy=fairscale", f"strategy.mode={mode}", f"cluster.processes={size}", "train.micro_batch_size=1")
    make_run(run_dir, *fixed, *options)
    assert train(run_dir, size) == [0] * size
    return run_dir


def test_oss_follows_one_process_and_its_checkpoint_moves(tmp_path: Path) -> None:
    one = make_run(tmp_path / "one", "cluster.processes=1")
    assert train(one) == [0]
    four = run_oss(tmp_path / "four", 4, "train.stop_after=10")
    plain = shutil.copytree(four, tmp_path / "plain")
    run_oss(four, 2, mode="sharded_ddp")
    assert summary(four)["start_step"] == 10
    assert max(abs(losses(four)[s] - losses(one)[s]) for s in losses(one)) < 1e-5
    norms = [[m["grad_norm"] for m in metrics(r) if "grad_norm" in m] for r in (four, one)]
    assert len(norms[0]) == 20 and max(abs(a - b) for a, b in zip(*norms, strict=True)) < 1e-4

    make_run(plain, "cluster.processes=1", "train.stop_after=12")
    assert train(plain) == [0]
    assert max(abs(losses(plain)[s] - losses(one)[s]) for s in (11, 12)) < 2e-6


def test_oss_resumes_bit_exact(tmp_path: Path) -> None:
    options = ("train.global_batch_size=6", "model.dropout=0.1", "checkpoint.every=4")  # with 3 ranks a sum has orders
    whole = run_oss(tmp_path / "whole", 3, *options, "train.stop_after=8")
    halves = run_oss(tmp_path / "halves", 3, *options, "train.stop_after=4")
    run_oss(halves, 3, *options, "train.stop_after=8")
    assert summary(halves)["start_step"] == 4
    assert {s: x.hex() for s, x in losses(whole).items()} == {s: x.hex() for s, x in losses(halves).items()}
    assert summary(whole)["weights_sha256"] == summary(halves)["weights_sha256"]
