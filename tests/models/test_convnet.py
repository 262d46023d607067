"""The small convnet: its figures, every picture that it takes, and the recipe that shows it learns."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.flop_counter import FlopCounterMode

from dtrain.checkpoint.initial_weights import Drawn
from dtrain.launch.arguments import prepare_arguments
from dtrain.models.convnet import ConvNet
from dtrain.strategies.materialize import init_weights
from tests.models.vision import make_run
from tests.world import summary, train


@settings(max_examples=15, deadline=None)
@given(st.integers(8, 33), st.sampled_from([1, 3]), st.integers(2, 12), st.integers(1, 8))
def test_it_takes_every_picture_and_counts_its_flops(size: int, channels: int, classes: int, width: int) -> None:
    model = ConvNet(size, channels, classes, width)
    init_weights(model, Drawn(0))
    x, y = torch.randn(2, channels, size, size), torch.tensor([0, classes - 1])
    assert model(x).shape == (2, classes)
    with FlopCounterMode(display=False) as counter:
        model(x, y).backward()
    assert counter.get_total_flops() == 2 * model.flops_per_sample()
    assert model.eval()(x, y).shape == (3,), "the loss, and how many were right"


def test_number_of_parameters_at_the_size_of_mnist() -> None:
    convolutions = 9 * (1 * 32 + 32 * 64 + 64 * 128) + 32 + 64 + 128
    assert ConvNet(28).num_parameters == convolutions + (3 * 3 * 128 * 128 + 128) + (128 * 10 + 10) == 241_546


def test_a_picture_that_is_too_small_is_refused() -> None:
    with pytest.raises(
        ValueError, match=r"model.image_size=7: must be at least 8 pixels, .*\n  fix: model.image_size=8"
    ):
        ConvNet(7)


def test_the_recipe_learns_the_digits(tmp_path: Path) -> None:
    """`python launch.py recipe=mnist-ddp`, whole: it promises 97%, and came to 99.2%."""
    run_dir = make_run(tmp_path / "run", *prepare_arguments(["recipe=mnist-ddp"]), base=[])
    assert train(run_dir, 2) == [0, 0]
    assert summary(run_dir)["val_accuracy"] >= 0.97
