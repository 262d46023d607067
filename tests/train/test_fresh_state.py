"""A rollback to the checkpoint that a fork began with starts the fork's own optimizer again."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch

from dtrain.train.fresh_state import FreshState
from dtrain.util.dtensor import Chunk


def test_the_second_load_restores_the_first_state() -> None:
    weight, moment, shard = torch.ones(3), torch.zeros(3), torch.zeros(2)
    extra: dict[str, Any] = {"optimizer": {"w": {"step": 0.0}}}
    strategy: Any = SimpleNamespace(extra_state=lambda: extra)
    state: dict[str, Any] = {"model.w": weight, "optim.w.momentum": moment, "optim.v.m": [Chunk(shard, (4,), (2,))]}
    state["optim.w.master"] = master = torch.full((3,), 2.0)
    fresh = FreshState(keeps=True)
    assert fresh.extra_of(strategy, state) == extra
    for tensor in (weight, moment, shard, master):
        tensor.fill_(7.0)
    extra["optimizer"]["w"]["step"] = 5.0
    assert fresh.extra_of(strategy, state) == {"optimizer": {"w": {"step": 0.0}}}
    assert fresh.tensors and fresh.tensors["optim.w.momentum"] == [None], "zeros need no copy"
    assert master.eq(2).all()
    assert not moment.any() and not shard.any() and weight.eq(7).all(), "weights come from the checkpoint"
    moment.fill_(7.0)
    fresh.extra_of(strategy, state)
    assert not moment.any(), "as often as it is needed"


def test_a_run_that_cannot_roll_back_copies_nothing() -> None:
    strategy: Any = SimpleNamespace(extra_state=dict)
    fresh = FreshState(keeps=False)
    fresh.extra_of(strategy, {"optim.w.momentum": torch.zeros(3)})
    assert fresh.tensors is None
