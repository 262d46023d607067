"""Weights that no step would train are named after the first backward pass."""

import logging

import pytest
import torch
from torch import nn

from dtrain.strategies import first_pass


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.used, self.extra, self.frozen = nn.Linear(2, 2), nn.Linear(2, 2), nn.Linear(2, 2)
        self.frozen.requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.frozen(self.used(x)).sum()


class FSDPModule:
    """By its name, as fully_shard puts it in front of the user's class."""


class FSDPNet(FSDPModule, Net):
    pass


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1)


TOLD = "model=Net: extra.weight, extra.bias got no gradient in the first step: forward() or the loss does not use them"


@pytest.mark.parametrize("kind", [Net, FSDPNet])
def test_unused_weights_are_named_by_the_users_class(kind: type[Net], caplog: pytest.LogCaptureFixture) -> None:
    model = kind()
    model(torch.ones(1, 2)).backward()
    with caplog.at_level(logging.WARNING, "dtrain"):
        assert first_pass.check(model, optimizer_of(model), needs_all=False) == TOLD
    assert TOLD in caplog.text
    with pytest.raises(ValueError, match=r"extra\.bias got no gradient .* waits for all\n  fix: use them"):
        first_pass.check(model, optimizer_of(model), needs_all=True)


def test_gradients_that_another_rank_gets_are_not_missed() -> None:
    model = Net()
    model(torch.ones(1, 2)).backward()
    assert first_pass.check(model, optimizer_of(model), False, reduced={*model.used.parameters()}) == ""
    assert first_pass.check(model, optimizer_of(model), False, reduced={*model.extra.parameters()}) == TOLD


def test_under_an_engine_that_takes_the_gradients() -> None:
    model, found = Net(), list[str]()
    with first_pass.watched(model, found):
        model(torch.ones(1, 2)).backward()
        model.zero_grad(set_to_none=True)
    assert found == [TOLD]
    model.extra.requires_grad_(False)
    with first_pass.watched(model, found):
        model(torch.ones(1, 2)).backward()
    assert found[1] == "", "frozen weights need none"
