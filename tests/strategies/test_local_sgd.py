"""Local SGD: apart between averages, one model at an average and at a save; and the docs show the code that runs."""

from __future__ import annotations

import functools
import math
import textwrap
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from dtrain.checkpoint.initial_weights import Drawn
from dtrain.config.build import build
from dtrain.config.files import CONF
from dtrain.config.run_file import load
from dtrain.strategies.base import Strategy
from dtrain.strategies.ddp import DDP
from dtrain.strategies.local_sgd import LocalSGD
from tests.world import ROOT, losses, make_run, spawn, summary, train


def test_docs_show_the_code_in_full() -> None:
    page = (ROOT / "docs" / "your-own.md").read_text()
    code, yaml = (
        path.read_text() for path in (ROOT / "dtrain/strategies/local_sgd.py", CONF / "strategy/local_sgd.yaml")
    )
    shown = [code[code.index("import torch\n") :], yaml[yaml.index("_target_:") :]]
    for text in shown:
        assert textwrap.indent(text, "    ", lambda line: bool(line.strip())) in page


# ---- on ranks of one process group ---------------------------------------------------------------------------


def sgd(named_parameters: Iterable[tuple[str, nn.Parameter]]) -> torch.optim.Optimizer:
    return torch.optim.SGD([{"params": [p for _, p in named_parameters], "peak_lr": 0.1}], lr=0.1)


def set_up(strategy: Strategy, run_dir: Path, make_optimizer: Callable[..., Any], **options: Any) -> Strategy:
    cfg = load(run_dir)
    with torch.device("meta"):
        model = build(cfg.model)
    common: dict[str, Any] = {"precision": build(cfg.precision), "device": torch.device("cpu"), "first": Drawn(5)}
    strategy.setup(model, make_optimizer, **common, micro_batch_size=2, **options)
    return strategy


def batch(step: int) -> tuple[Tensor, Tensor]:
    """Another one on every rank."""
    generator = torch.Generator().manual_seed(100 * step + dist.get_rank())
    tokens = torch.randint(0, 61, (4, 17), generator=generator)
    return tokens[:, :-1], tokens[:, 1:]


def weights(strategy: Strategy) -> Tensor:
    return torch.cat([p.detach().flatten() for p in strategy.module.parameters()])


def everywhere(value: Tensor) -> Tensor:
    values = [torch.empty_like(value) for _ in range(dist.get_world_size())]
    dist.all_gather(values, value)
    return torch.stack(values)


def averages_when_it_is_time(run_dir: Path) -> None:
    adamw = build(load(run_dir).optim)
    strategy = set_up(LocalSGD(every=3), run_dir, adamw, max_grad_norm=1.0)
    for step in range(1, 7):
        strategy.train_step(*batch(step))
        same = all(torch.equal(w, weights(strategy)) for w in everywhere(weights(strategy)))
        assert same == (step % 3 == 0), f"after step {step}"

    strategy.train_step(*batch(7))
    before = everywhere(weights(strategy))
    moment = next(iter(strategy.optimizer.state.values()))["exp_avg"].clone()
    state = strategy.state_dict()
    torch.testing.assert_close(weights(strategy), before.mean(0), msg="a save averages")
    for name, tensor in state.items():
        assert isinstance(tensor, Tensor)
        assert all(torch.equal(t, tensor) for t in everywhere(tensor)), name
    assert not torch.equal(next(iter(strategy.optimizer.state.values()))["exp_avg"], moment), "the moments, too"

    before = weights(strategy).clone()
    hooks = []
    if dist.get_rank() == 1:  # a gradient that is not finite, on one rank only
        hooks = [p.register_hook(lambda g: g * math.nan) for p in list(strategy.module.parameters())[:1]]
    result = strategy.train_step(*batch(8)).read()
    for hook in hooks:
        hook.remove()
    assert not result.updated and math.isfinite(result.loss) and not math.isfinite(result.grad_norm)
    assert torch.equal(weights(strategy), before), "no rank may step when one cannot"
    assert strategy.train_step(*batch(9)).read().updated


def test_averages_when_it_is_time_and_at_a_save(tmp_path: Path) -> None:
    spawn(2, averages_when_it_is_time, make_run(tmp_path))


def every_step_is_ddp(run_dir: Path) -> None:
    distance = {}
    adamw = functools.partial(build(load(run_dir).optim), lr=1e-2)
    for make_optimizer in (sgd, adamw):
        ours, ddp = (set_up(s, run_dir, make_optimizer) for s in (LocalSGD(every=1), DDP()))
        first = weights(ours).clone()
        for step in range(5):
            mine, theirs = (s.train_step(*batch(step)).read() for s in (ours, ddp))
            if (
                make_optimizer is sgd
            ):  # the same weights then, and the mean of vectors is shorter than their norms' mean
                assert abs(mine.loss - theirs.loss) < 1e-5 and mine.grad_norm > theirs.grad_norm
        moved = (weights(ddp) - first).abs().max()
        distance[make_optimizer] = ((weights(ours) - weights(ddp)).abs().max() / moved).item()
    assert distance[sgd] < 1e-4 and distance[adamw] > 1e-2, distance


def test_averaging_every_step_is_ddp_for_plain_sgd_only(tmp_path: Path) -> None:
    spawn(2, every_step_is_ddp, make_run(tmp_path))


# ---- runs ----------------------------------------------------------------------------------------------------


def test_stays_within_its_own_tolerance(tmp_path: Path) -> None:
    curves = []
    for strategy, size in (("ddp", 1), ("local_sgd", 4)):
        run = make_run(tmp_path / strategy, f"strategy={strategy}", f"cluster.processes={size}")
        assert train(run, size) == [0] * size
        curves.append(losses(run))
    apart = max(abs(curves[0][s] - curves[1][s]) for s in curves[0])
    assert LocalSGD.tolerance is not None and 0.05 < apart < LocalSGD.tolerance
    assert curves[0][1] == pytest.approx(curves[1][1], abs=1e-5), "the first loss is of the same weights"


def test_resume_is_bit_exact_where_a_save_is_not_an_average(tmp_path: Path) -> None:
    runs = {}
    for name, stops in {"whole": [12], "halves": [6, 12]}.items():
        for stop in stops:  # every=4: steps 3, 6 and 9 are saved between two averages
            options = ("cluster.processes=2", "checkpoint.every=3", "model.dropout=0.1", f"train.stop_after={stop}")
            runs[name] = make_run(tmp_path / name, "strategy=local_sgd", *options)
            assert train(runs[name], 2) == [0, 0]
    assert summary(runs["halves"])["start_step"] == 6
    assert {s: x.hex() for s, x in losses(runs["whole"]).items()} == {
        s: x.hex() for s, x in losses(runs["halves"]).items()
    }
    assert summary(runs["whole"])["weights_sha256"] == summary(runs["halves"])["weights_sha256"]
