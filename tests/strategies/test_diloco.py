"""DiLoCo: ddp in its simplest setting, torch's Nesterov in the outer step, and a resume that continues bit for bit."""

from __future__ import annotations

import functools
from pathlib import Path

import pytest
import torch
from torch import Tensor

from dtrain.config.build import build
from dtrain.config.run_file import load
from dtrain.strategies.ddp import DDP
from dtrain.strategies.diloco import DiLoCo, split
from tests.strategies.test_local_sgd import batch, everywhere, set_up, sgd, weights
from tests.world import losses, make_run, spawn, summary, train


def every_step_is_ddp(run_dir: Path) -> None:
    distance = {}
    adamw = functools.partial(build(load(run_dir).optim), lr=1e-2)
    for make_optimizer in (sgd, adamw):
        simplest = DiLoCo(every=1, outer_lr=1.0, outer_momentum=0.0)
        ours, ddp = (set_up(s, run_dir, make_optimizer) for s in (simplest, DDP()))
        apart = [abs(ours.train_step(*batch(s)).read().loss - ddp.train_step(*batch(s)).read().loss) for s in range(5)]
        distance[make_optimizer] = max(apart)
    print(distance)
    assert distance[sgd] < 1e-5 < 1e-3 < distance[adamw], distance


@pytest.mark.parametrize("ranks", [2, 4])
def test_exchanging_every_step_is_ddp_for_sgd(ranks: int, tmp_path: Path) -> None:
    spawn(ranks, every_step_is_ddp, make_run(tmp_path))


def outer_steps(run_dir: Path) -> None:
    """Each fragment follows torch's SGD along the mean of the changes, in its own steps, and nothing else moves."""
    strategy = set_up(DiLoCo(every=4, fragments=2), run_dir, sgd)
    assert isinstance(strategy, DiLoCo)
    reference = {name: torch.nn.Parameter(p.detach().clone()) for name, p in strategy.trained.items()}
    nesterov = torch.optim.SGD(reference.values(), lr=0.7, momentum=0.9, nesterov=True)
    before: dict[str, Tensor] = {}
    strategy.outer_step = functools.partial(_noted, strategy, strategy.outer_step, before)  # type: ignore[method-assign]
    for step in range(1, 13):
        before.clear()
        strategy.train_step(*batch(step))
        due = {0: [4, 8, 12], 1: [2, 6, 10]}
        names = [n for i, part in enumerate(strategy.parts) if step in due[i] for n in part]
        assert list(before) == names, f"step {step}"
        for name, p in reference.items():
            p.grad = p.detach() - everywhere(before[name]).mean(0) if name in before else None
        nesterov.step()
        for name in names:
            torch.testing.assert_close(strategy.trained[name].detach(), reference[name].detach())
            assert torch.equal(strategy.trained[name], strategy.outer[name])
    assert not all(torch.equal(w, weights(strategy)) for w in everywhere(weights(strategy))), "the rest stays apart"


def _noted(strategy: DiLoCo, outer_step: object, before: dict[str, Tensor], names: list[str]) -> None:
    before.update({name: strategy.trained[name].detach().clone() for name in names})
    outer_step(names)  # type: ignore[operator]


def test_outer_steps(tmp_path: Path) -> None:
    spawn(2, outer_steps, make_run(tmp_path))


def test_fragments_have_about_the_same_size() -> None:
    tensors = {str(i): torch.empty(10 + i % 3) for i in range(40)}
    parts = split(tensors, 4)
    assert [name for part in parts for name in part] == list(tensors)
    assert {len(part) for part in parts} <= {9, 10, 11}
    assert split({"one": torch.empty(3)}, 4) == [["one"]]


def test_resume_is_bit_exact_where_a_save_is_not_an_outer_step(tmp_path: Path) -> None:
    runs = {}
    settings = ("strategy.every=4", "strategy.fragments=2", "strategy.exchange=int8", "model.dropout=0.1")
    for name, stops in {"whole": [12], "halves": [7, 12]}.items():
        for stop in stops:  # outer steps at 2, 4, 6, …; saves at 7 and 12
            options = ("cluster.processes=2", "checkpoint.every=7", f"train.stop_after={stop}", *settings)
            runs[name] = make_run(tmp_path / name, "strategy=diloco", *options)
            assert train(runs[name], 2) == [0, 0]
    assert summary(runs["halves"])["start_step"] == 7
    hexes = [{s: x.hex() for s, x in losses(runs[name]).items()} for name in runs]
    assert hexes[0] == hexes[1]
    assert summary(runs["whole"])["weights_sha256"] == summary(runs["halves"])["weights_sha256"]
    # under another strategy and with another number of ranks, and back
    for words, ranks, stop in (("strategy=ddp", 1, 14), ("strategy=diloco", 2, 16)):
        run = make_run(tmp_path / "halves", words, f"cluster.processes={ranks}", f"train.stop_after={stop}")
        assert train(run, ranks) == [0] * ranks
        assert summary(run)["start_step"] == stop - 2 and losses(run)[stop] < losses(run)[1]
