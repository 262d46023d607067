"""The moving average of the weights: its formula, skipped steps, and its way through checkpoints and commands."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from dtrain.checkpoint import store
from dtrain.commands.evaluate import evaluate
from dtrain.optim.average import WeightAverage
from dtrain.optim.build import adamw, lion, muon, sgd
from dtrain.runs.folder import latest_checkpoint
from dtrain.strategies.optimizer_state import init_optimizer_state
from tests.world import make_run, metrics, train

MAKERS = {
    "adamw": lambda named: adamw(named, lr=0.1, betas=[0.9, 0.95]),
    "lion": lambda named: lion(named, lr=0.1, betas=[0.9, 0.99]),
    "muon": lambda named: muon(named, lr=0.1, adamw_betas=[0.9, 0.95]),
    "sgd": lambda named: sgd(named, lr=0.1, momentum=0.0),
}


@pytest.mark.parametrize("name", MAKERS)
def test_it_follows_its_formula(name: str) -> None:
    generator = torch.Generator().manual_seed(0)
    named = [
        (f"layers.{i}", nn.Parameter(torch.randn(shape, generator=generator))) for i, shape in enumerate([(4, 4), (4,)])
    ]
    named = [(f"{n}.weight", p) for n, p in named]
    optimizer = MAKERS[name](named)
    init_optimizer_state(optimizer)
    WeightAverage(optimizer, 0.75, [p for _, p in named])
    expected = {n: p.detach().clone() for n, p in named}
    for step in range(5):
        for _, p in named:
            p.grad = torch.randn(p.shape, generator=generator)
        if hasattr(optimizer, "step_if") and step != 1:
            optimizer.step_if(torch.tensor(step != 3), torch.tensor(0.5))
        else:
            optimizer.step()
        for n, p in named:
            if step != 3 or name in ("lion", "sgd"):  # a skipped step is no step of the average, either
                expected[n] = 0.75 * expected[n] + 0.25 * p.detach()
    for n, p in named:
        torch.testing.assert_close(optimizer.state[p]["ema"], expected[n])
        assert not torch.equal(optimizer.state[p]["ema"], p)


@pytest.mark.parametrize(
    ("strategy", "size"),
    [
        pytest.param(strategy, 2, marks=[] if strategy == "fsdp" else pytest.mark.slow)
        for strategy in ("ddp", "fsdp", "zero1", "zero3", "tensor", "pipeline", "fairscale", "ring", "ps")
    ],
)
def test_it_is_the_same_under_every_strategy_and_evaluated(strategy: str, size: int, tmp_path: Path) -> None:
    """As one process has it; evaluated in training and by the command alike."""
    options = ["ema.decay=0.9", "train.steps=6", "train.eval_batches=2", "data.num_samples=80"]
    can = strategy in ("ddp", "fsdp", "tensor", "pipeline", "ring")
    one = make_run(tmp_path / "one", *options, "ema.evaluate=true", "cluster.processes=1")
    two = make_run(
        tmp_path / "two",
        *options,
        f"ema.evaluate={str(can).lower()}",
        f"strategy={strategy}",
        f"cluster.processes={size}",
    )
    assert train(one, 1) == [0] and train(two, size) == [0] * size
    checkpoints = [latest_checkpoint(run) for run in (one, two)]
    assert checkpoints[0] and checkpoints[1]
    ours, theirs = (dict(store.weights(path, average=True)) for path in checkpoints if path)
    plain = dict(store.weights(checkpoints[0]))
    assert ours.keys() == theirs.keys() == plain.keys()
    for name, values in ours.items():
        torch.testing.assert_close(values, theirs[name], atol=1e-5, rtol=0)
    assert any((values - plain[name]).abs().max() > 1e-3 for name, values in ours.items()), "it lags behind"
    found = [[row["val_loss"] for row in metrics(run) if "val_loss" in row][-1] for run in (one, two)]
    if can:
        assert found[0] == pytest.approx(found[1], abs=1e-5)
    else:
        assert abs(found[0] - found[1]) > 1e-5, "of the weights themselves"
    losses = {ema: evaluate(two, ema=ema)["loss"] for ema in (False, True)}
    assert losses[True] != losses[False]


def test_without_an_average_the_flag_is_refused(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", "train.steps=1", "cluster.processes=1")
    assert train(run, 1) == [0]
    with pytest.raises(ValueError, match="has no averages"):
        evaluate(run, ema=True)
    with pytest.raises(ValueError, match=r"ema\.evaluate=true: there is no average"):
        make_run(tmp_path / "other", "ema.evaluate=true")
    with pytest.raises(ValueError, match=r"ema\.evaluate=true: under strategy=zero1"):
        make_run(tmp_path / "zero", "ema.evaluate=true", "ema.decay=0.9", "strategy=zero1", "cluster.processes=2")
