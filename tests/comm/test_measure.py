"""The clock of collectives: the slowest rank counts, all ranks agree, and a slow link does not hang it."""

from __future__ import annotations

import time

import pytest
import torch
import torch.distributed as dist

from dtrain.comm import measure
from dtrain.comm.measure import BUS, Timing, quantile, rounds
from tests.world import spawn

CPU = torch.device("cpu")


def the_slowest_rank_counts() -> None:
    world, rank = dist.group.WORLD, dist.get_rank()
    agree = measure.slowest_of(world)

    def step() -> None:
        time.sleep(0.01 * (rank + 1))

    found = measure.timing(step, "all_reduce", 8, world, agree, CPU, 0.2)
    assert found.p50 >= 0.03 and found.p99 >= found.p50 and found.ranks == 3
    assert agree([found.p50, -found.p50]) == [found.p50, -found.p50]  # the same on every rank
    assert found.calls <= 20  # by the slowest: 10 ms a call would have allowed more

    for kind in BUS:
        [small, large] = measure.sweep(kind, [12, 3 * 2**16], world, agree, CPU, 1e6, 5)  # also on a busy machine
        assert (small.kind, small.num_bytes, large.num_bytes, large.calls) == (kind, 12, 3 * 2**16, 5)
    assert len(measure.sweep("all_reduce", [12, 2**20], world, agree, CPU, 1e-9)) == 1  # no time for more

    if rank < 2:
        found = measure.one_way(2**16, world, world, CPU, 1, 0, 0.05)
        assert found.kind == "send_recv" and found.bus_gb_s == found.algorithm_gb_s > 0
        assert measure.slowest_of_two(world, 1 - rank)([rank, -rank]) == [1, 0]


def test_real_ranks_measure_together() -> None:
    spawn(3, the_slowest_rank_counts)


def what_is_sent_arrives() -> None:
    """The steps are the collectives that they are called: their results show it."""
    world, rank = dist.group.WORLD, dist.get_rank()
    sent = torch.full((4,), float(rank))
    step = measure.exchange(sent, world, (rank + 1) % 3, (rank - 1) % 3)
    step()
    received = step.__closure__ and [c.cell_contents for c in step.__closure__]
    tensors = [t for t in received or [] if isinstance(t, torch.Tensor) and t is not sent]
    assert [t.tolist() for t in tensors] == [[float((rank - 1) % 3)] * 4]


def test_a_ring_receives_from_the_rank_before() -> None:
    spawn(3, what_is_sent_arrives)


@pytest.mark.parametrize(("kind", "factor"), [("all_reduce", 1.5), ("all_gather", 0.75), ("broadcast", 1.0)])
def test_bus_bandwidth_is_that_of_the_busiest_link(kind: str, factor: float) -> None:
    found = Timing(kind, 4 * 10**9, 4, 2.0, 3.0, 7, 9.0)
    assert found.algorithm_gb_s == 2.0 and found.bus_gb_s == 2.0 * factor


@pytest.mark.parametrize("number", [2, 3, 6, 7])
def test_everyone_meets_everyone_once(number: int) -> None:
    made = rounds(range(number))
    pairs = [frozenset(pair) for pairs in made for pair in pairs]
    assert len(pairs) == len(set(pairs)) == number * (number - 1) // 2
    assert all(len({n for pair in pairs for n in pair}) == 2 * len(pairs) for pairs in made)


def test_quantiles() -> None:
    assert quantile(range(100), 0.99) == 98 and quantile([3.0], 0.99) == 3.0 and quantile([1, 2, 3, 4], 0.5) == 2
