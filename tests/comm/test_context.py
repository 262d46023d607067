"""Context parallel: each rank computes a part of every sequence, and the results are those of one process."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from functools import partial
from itertools import product
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from dtrain.comm.context import Kind, Sequences
from dtrain.models import losses
from dtrain.models.layers import IGNORED
from dtrain.models.user_model import attach_loss
from tests.models.test_packed import MODELS, pack
from tests.world import spawn

KINDS: tuple[Kind, ...] = ("ring", "allgather", "ulysses")
LOSSES: dict[str, Any] = {
    "cross_entropy": losses.cross_entropy,
    "smoothed": partial(losses.cross_entropy, label_smoothing=0.1),
}
LENGTH = 32


@dataclass(frozen=True)
class Case:
    """A model, whether its sequences are packed documents, how many ranks divide them, how, and the loss."""

    model: str
    is_packed: bool
    size: int
    kind: Kind
    loss: str = "own"


# ulysses divides the heads, and llama has two heads of keys
GRID = [case for case in map(Case, *zip(*product(MODELS, (False, True), (2, 4), KINDS), strict=True))
        if (case.model, case.size, case.kind) != ("llama", 4, "ulysses")]  # fmt: skip
SOME = [
    Case("gpt2", True, 4, "ring"),
    Case("llama", False, 4, "ring"),
    Case("llama", True, 2, "allgather"),
    Case("gpt2", True, 4, "ulysses"),
    Case("llama", True, 2, "ulysses"),
    Case("gpt2", False, 2, "ring", "cross_entropy"),
    Case("llama", False, 4, "allgather", "smoothed"),
]


@pytest.mark.parametrize("cases", [SOME, GRID], ids=["some", "all"])
def test_losses_and_gradients_are_those_of_one_process(cases: list[Case]) -> None:
    spawn(4, compare, cases)


def compare(cases: list[Case]) -> None:
    groups = {2: dist.new_subgroups(2)[0], 4: dist.group.WORLD}
    for case in cases:
        group = groups[case.size]
        assert group is not None
        for name, difference in differences(case, group).items():
            assert difference < 1e-5, (case, name, difference)


def differences(case: Case, group: dist.ProcessGroup) -> dict[str, float]:
    """How far the loss and each parameter's gradient, relative to its norm if that is above 1, are from one process."""
    model = copy.deepcopy(MODELS[case.model]).train()
    if case.loss != "own":
        attach_loss(model, LOSSES[case.loss])
    tokens, y = torch.randint(0, 50, (2, 2, LENGTH), generator=torch.Generator().manual_seed(0))
    y[0, 3:] = IGNORED  # so there are parts without a target
    y[1, 20:] = IGNORED
    inputs = pack(tokens, [3, 9, 1, 12, 7]) if case.is_packed else tokens
    expected = results(model, model(inputs, y))

    sequences = Sequences(group, case.kind)
    targets = sequences.tokens(y)
    share = (targets != IGNORED).sum() / (y != IGNORED).sum()
    loss = model(inputs, targets, cache=sequences)
    ours = results(model, torch.where(share > 0, loss, 0.0) * share)
    flat = torch.cat([tensor.flatten() for tensor in ours.values()])
    dist.all_reduce(flat, group=group)
    parts = zip(ours, flat.split([t.numel() for t in ours.values()]), strict=True)
    return {name: distance(part, expected[name].flatten()) for name, part in parts}


def results(model: nn.Module, loss: Tensor) -> dict[str, Tensor]:
    """The loss and each parameter's gradient."""
    model.zero_grad()
    loss.backward()
    return {"loss": loss.detach().clone()} | {
        n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None
    }


def distance(ours: Tensor, expected: Tensor) -> float:
    return float((ours - expected).norm() / max(1.0, float(expected.norm())))


def test_outputs_are_gathered_in_their_order() -> None:
    spawn(2, gather)


def gather() -> None:
    tokens = torch.randint(0, 50, (2, LENGTH), generator=torch.Generator().manual_seed(0))
    model = MODELS["llama"]
    assert dist.group.WORLD is not None
    for kind in KINDS:
        sequences = Sequences(dist.group.WORLD, kind)
        with torch.no_grad():
            outputs = sequences.whole(model(tokens, cache=sequences))
            torch.testing.assert_close(outputs, model(tokens), rtol=0, atol=1e-5, msg=kind)
