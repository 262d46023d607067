"""Collectives: latency and bandwidth, on two levels."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dtrain.config.hardware import Hardware
from dtrain.plan.time.collectives import Group, collective_s, rate, send_s

NODE = Hardware(
    gpus_per_node=8, nvlink_max_gb_s=400, gather_max_gb_s=300, collective_us=20, nvlink_latency_us=2,
    network_max_gb_s=200, network_latency_us=15, network_rail_gb_s=24,
)  # fmt: skip
KINDS = st.sampled_from(["all_reduce", "all_gather", "reduce_scatter"])


def test_one_rank_says_nothing() -> None:
    assert collective_s(NODE, "all_reduce", Group(1, 1), 1e9) == 0


def test_an_all_reduce_in_a_node_by_hand() -> None:
    # 20 µs, 14 hops of 2 µs, and 7/4 of 8 GB at 400 GB/s
    assert collective_s(NODE, "all_reduce", Group(8, 8), 8e9) == pytest.approx(20e-6 + 14 * 2e-6 + 14 / 8 * 8 / 400)


def test_an_all_gather_over_nodes_by_hand() -> None:
    # a ring of 32 ranks in 4 nodes: 31 hops, of which one in 8 goes over the network
    hop = (7 * 2 + 15) / 8 * 1e-6
    assert collective_s(NODE, "all_gather", Group(32, 8), 8e9) == pytest.approx(20e-6 + 31 * hop + 31 / 32 * 8 / 200)


def test_a_group_has_its_share_of_the_nodes_adapters() -> None:
    assert rate(NODE, "all_gather", Group(16, 1)) == 200e9 / 8  # tensor ranks: each talks to its peer in other nodes
    assert rate(NODE, "all_gather", Group(16, 2)) == 200e9 / 4


def test_two_nodes_reduce_nearly_twice_as_fast_as_more() -> None:
    """A tree of two sends each byte once over an adapter; in bus bandwidth that is 2 (n - 1) / n of its rate."""
    assert rate(NODE, "all_reduce", Group(16, 8)) == pytest.approx(2 * 15 / 16 * rate(NODE, "all_reduce", Group(24, 8)))


@given(KINDS, st.sampled_from([1, 2, 4, 8]), st.sampled_from([2, 3, 4, 16]), st.floats(1e6, 1e11))
def test_a_message_is_never_faster_than_the_adapters_that_carry_it(
    kind: str, per_node: int, nodes: int, num_bytes: float
) -> None:
    """Whatever the algorithm, all that a node does not hold yet must come in through its share of the adapters."""
    share = 200e9 * per_node / 8
    arrives = num_bytes * (1 if kind == "all_reduce" else (nodes - 1) / nodes)
    assert collective_s(NODE, kind, Group(nodes * per_node, per_node), num_bytes) >= arrives / share * (1 - 1e-9)


def test_a_message_to_another_node_takes_one_adapter() -> None:
    assert send_s(NODE, 24e9, crosses=True) == pytest.approx(1, rel=1e-3)
    assert send_s(NODE, 24e9, crosses=False) == pytest.approx(24 / 300, rel=1e-3)


@given(KINDS, st.sampled_from([2, 4, 8, 16, 64, 512]), st.floats(1, 1e11), st.floats(1.01, 10))
def test_more_bytes_take_longer(kind: str, ranks: int, num_bytes: float, factor: float) -> None:
    group = Group(ranks, min(8, ranks))
    assert collective_s(NODE, kind, group, num_bytes) < collective_s(NODE, kind, group, factor * num_bytes)


@given(KINDS, st.floats(1e6, 1e11))
def test_more_nodes_never_make_it_faster(kind: str, num_bytes: float) -> None:
    for per_node in (1, 2, 8):
        times = [collective_s(NODE, kind, Group(per_node * nodes, per_node), num_bytes) for nodes in (1, 2, 4, 8, 64)]
        assert times == sorted(times)
