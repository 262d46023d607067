"""The bubble that is predicted is the one of the schedule, played through, also where one stage takes longer."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dtrain.config.hardware import load
from dtrain.plan.layout import Layout
from dtrain.plan.ledger import by_part
from dtrain.plan.model_shape import Transformer
from dtrain.plan.time.pipeline import pipeline_items
from dtrain.plan.time.stack import STACKS
from dtrain.plan.time.step import step_time

NODE = load("h100-ndr")


def played(passes: list[float], micro_batches: int) -> float:
    """Seconds of 1F1B: each rank in its order, a forward pass a third of its time, once what it needs is there."""
    orders = []
    for rank in range(len(passes)):
        ahead = min(len(passes) - rank - 1, micro_batches)
        order = [("forward", i) for i in range(ahead)]
        for i in range(micro_batches):
            order += [("forward", ahead + i)] * (ahead + i < micro_batches) + [("backward", i)]
        orders.append(order)
    done: dict[tuple[str, int, int], float] = {}
    free, at = [0.0] * len(passes), [0] * len(passes)
    while any(here < len(order) for here, order in zip(at, orders, strict=True)):
        for rank, order in enumerate(orders):
            while at[rank] < len(order):
                kind, i = order[at[rank]]
                before = rank - 1 if kind == "forward" else rank + 1
                is_edge = before in (-1, len(passes))
                if not is_edge and (kind, before, i) not in done:
                    break
                start = max(free[rank], 0.0 if is_edge else done[kind, before, i])
                free[rank] = start + passes[rank] * (1 / 3 if kind == "forward" else 2 / 3)
                done[kind, rank, i] = free[rank]
                at[rank] += 1
    return max(free)


@given(
    ranks=st.integers(2, 8),
    micro_batches=st.integers(1, 24),
    block=st.floats(0.1, 10),
    head=st.floats(0, 20),
)
def test_a_last_stage_with_the_head_waits_for_the_others_and_not_for_as_many_of_its_own(
    ranks: int, micro_batches: int, block: float, head: float
) -> None:
    passes = [block] * (ranks - 1) + [block + head]
    layout = Layout("pipeline", pp=ranks, micro_batches=micro_batches, data="ddp")
    shape = Transformer(ranks, 256, 4, 4, 1024, 128, 50304)
    others = micro_batches * sum(passes[:-1])
    items = pipeline_items(shape, layout, NODE, STACKS["megatron-2021"], others)
    bubble = by_part(items)["bubble"]
    assert micro_batches * passes[-1] + bubble == pytest.approx(played(passes, micro_batches))


def test_a_heavy_head_is_not_waited_for_more_than_once() -> None:
    """A small model with a large vocabulary: the last rank's pass is several times as long as another's."""
    shape = Transformer(8, 512, 8, 8, 2048, 1024, 131072)
    layout = Layout("pipeline", pp=4, micro_batch_size=8, micro_batches=8)
    parts = by_part(step_time(shape, layout, NODE, STACKS["megatron-2021"]))
    assert 0 < parts["bubble"] < 0.5 * 3 / 8 * parts["compute"]
