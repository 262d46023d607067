"""What to do about errors of torch, by their own words: each is raised by torch here, not written down."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from dtrain.config.files import TARGET
from dtrain.train.hints import hint
from dtrain.train.setup import of_whole_batches


@pytest.mark.parametrize(
    ("fails", "fix"),
    [
        (lambda: nn.Conv2d(1, 4, 3)(torch.ones(8, 28, 28)), "image.unsqueeze(0)"),
        (lambda: nn.Conv2d(3, 4, 3)(torch.ones(8, 28, 28, 3)), "image.permute(2, 0, 1)"),
        (lambda: nn.Conv1d(12, 4, 3)(torch.ones(8, 100, 12)), "x.transpose(1, 2)"),
        (lambda: nn.Conv2d(16, 4, 3)(torch.ones(8, 32, 28, 28)), "expects 16 channels and gets 32"),
        (lambda: nn.Linear(4, 2)(torch.ones(8, 5)), "expects 4 features and gets 5"),
    ],
)
def test_shapes_that_do_not_fit_a_layer(fails: Callable[[], object], fix: str) -> None:
    with pytest.raises(RuntimeError) as error:
        fails()
    assert fix in hint(error.value)


@pytest.mark.parametrize(
    ("inputs", "targets", "warned"),
    [
        (torch.ones(1, 8, 4), torch.zeros(1, 8), True),  # a stream of batches of 8
        (torch.ones(1, 9, 4), torch.zeros(1, 9), False),  # a sequence, each place of which has a class
        (torch.ones(1, 8, 4), torch.zeros(1), False),
        (torch.ones(1, 8), torch.zeros(1, 8), False),
        (torch.ones(1, 8, 4).long(), torch.zeros(1, 8), False),
    ],
)
def test_samples_that_look_like_batches_are_warned_of(
    inputs: torch.Tensor, targets: torch.Tensor, warned: bool
) -> None:
    cfg = SimpleNamespace(
        train=SimpleNamespace(global_batch_size=8, micro_batch_size=None), data={TARGET: "net.Stream"}, choices={}
    )
    assert bool([*of_whole_batches(cfg, inputs, targets)]) is warned  # type: ignore[arg-type]
