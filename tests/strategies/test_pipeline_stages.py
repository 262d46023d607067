"""What a model's own pipeline_split may return."""

from __future__ import annotations

import pytest
from torch import nn

from dtrain.strategies.pipeline_stages import split_points, stage_of


class Deep(nn.Module):
    def __init__(self, returns: bool) -> None:
        super().__init__()
        self.layers = nn.ModuleDict({str(i): nn.Linear(4, 4) for i in range(4)})
        self.head = nn.Linear(4, 100)
        self.returns = returns

    def fsdp_units(self) -> list[nn.Module]:
        return list(self.layers.values())

    def pipeline_split(self, low: int, high: int) -> Deep | None:
        for name in [*self.layers]:
            if not low <= int(name) < high:
                del self.layers[name]
        if high < 4:
            self.head = None
        return self if self.returns else None


@pytest.mark.parametrize("returns", [True, False])
def test_a_split_may_delete_in_place(returns: bool) -> None:
    model = Deep(returns)
    assert [name for name, _ in stage_of(model, 1, 3).named_parameters()] == [
        "layers.1.weight", "layers.1.bias", "layers.2.weight", "layers.2.bias",
    ]  # fmt: skip
    assert len(model.layers) == 4, "the model itself stays whole"
    assert split_points(model, 2, None) == [(0, 3), (3, 4)], "the head weighs as much as many layers"
