"""Who is to blame: from pairs that do not connect, streams that are slow, and figures of collectives between nodes."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dtrain.preflight import reachability
from dtrain.preflight.reachability import Peer
from dtrain.preflight.slow_nodes import MOST_ROUNDS, Hunt, name_slow

NODES = ["n1", "n2", "n3", "n4"]


def hunt(
    nodes: list[str], slow: set[str], links: set[frozenset[str]] = frozenset(), least: float | None = None
) -> Hunt:  # type: ignore[assignment]
    """Measure what the hunt asks for, on a fabric with slow nodes and slow links."""
    found = Hunt(nodes, least, 0.5)
    for _ in range(MOST_ROUNDS):
        pairs = found.next_round()
        if not pairs:
            return found
        assert len({node for pair in pairs for node in pair}) == 2 * len(pairs)
        for pair in pairs:
            assert found.key(pair) not in found.rates
            found.record(pair, 1.0 if set(pair) & slow or frozenset(pair) in links else 10.0)
    raise AssertionError("too many rounds")


@given(st.integers(3, 24).flatmap(lambda n: st.tuples(st.just(n), st.sets(st.integers(0, n - 1), max_size=n // 3))))
def test_slow_nodes_are_found_exactly_and_in_few_rounds(case: tuple[int, set[int]]) -> None:
    number, slow = case
    nodes = [f"n{i}" for i in range(number)]
    found = hunt(nodes, {f"n{i}" for i in slow}).verdict()
    assert set(found.nodes) == {f"n{i}" for i in slow} and not found.links and not found.all_slow


def test_a_slow_link_is_not_a_slow_node() -> None:
    found = hunt(NODES, set(), {frozenset({"n1", "n2"})}).verdict()
    assert found.nodes == [] and found.links == [("n1", "n2")]


def test_when_all_are_slow_it_is_the_fabric() -> None:
    found = hunt(NODES, set(NODES), least=5.0).verdict()
    assert found.all_slow and found.nodes == NODES
    assert hunt(NODES[:2], {"n2"}, least=5.0).verdict().nodes == ["n1", "n2"]  # one pair cannot tell


def reports(
    pairs: dict[tuple[str, str], Any], key: str, nodes: list[str] = NODES, **more: Any
) -> dict[str, dict[str, Any]]:
    return {n: {key: {b: v for (a, b), v in pairs.items() if a == n}, **more} for n in nodes}


def states(found: dict[str, list[dict[str, str]]]) -> dict[str, str]:
    return {node: findings[0]["state"] for node, findings in found.items()}


def all_pairs(value: Any) -> dict[tuple[str, str], Any]:
    return {(a, b): value for a in NODES for b in NODES if a != b}


def test_a_node_that_nobody_reaches_is_the_bad_one() -> None:
    pairs = {pair: "timed out" if "n3" in pair else "" for pair in all_pairs("")}
    found = reachability.judge_reach(reports(pairs, "reach"), "eth0")
    assert states(found) == {"n1": "ok", "n2": "ok", "n3": "bad", "n4": "ok"}
    assert "no connection over eth0: n1 → n3 (timed out)" in found["n3"][0]["text"]


def test_a_single_bad_pair_names_both_ends() -> None:
    pairs = all_pairs("") | {("n1", "n2"): "refused"}
    assert states(reachability.judge_reach(reports(pairs, "reach"), None)) == {
        "n1": "bad",
        "n2": "bad",
        "n3": "ok",
        "n4": "ok",
    }
    assert states(reachability.judge_reach({"n1": {"reach": {}}}, None)) == {"n1": "skipped"}


def test_a_slow_sender_a_slow_receiver_and_a_slow_pair() -> None:
    for end in (0, 1):
        flows = {pair: 2.0 if pair[end] == "n2" else 900.0 for pair in all_pairs(0)}
        found = reachability.judge_streams(reports(flows, "streams"), "eth0")
        assert states(found) == {"n1": "ok", "n2": "bad", "n3": "ok", "n4": "ok"}
        assert "MB/s" in found["n2"][0]["text"] and "best of all has 900 MB/s" in found["n2"][0]["text"]
    flows = all_pairs(900.0) | {("n1", "n2"): 2.0}
    assert states(reachability.judge_streams(reports(flows, "streams"), None)) == {
        "n1": "bad",
        "n2": "bad",
        "n3": "ok",
        "n4": "ok",
    }


def test_two_nodes_are_held_against_the_links_own_rate() -> None:
    flows = {("n1", "n2"): 3.0, ("n2", "n1"): 900.0}
    assert set(states(reachability.judge_streams(reports(flows, "streams", NODES[:2]), None)).values()) == {
        "ok"
    }  # who knows
    found = reachability.judge_streams(reports(flows, "streams", NODES[:2], speed_mb_s=1250.0), "eth0")
    assert set(states(found).values()) == {"bad"} and "eth0 says 10 Gb/s" in found["n1"][0]["text"]


def test_real_peers_reach_each_other_and_refuse_strangers() -> None:
    one, two, stranger = Peer("127.0.0.1", "t", "one"), Peer("127.0.0.1", "t", "two"), Peer("127.0.0.1", "other", "x")
    nobody = ("127.0.0.1", 1)
    reached = one.reach({"two": two.address, "x": stranger.address, "nobody": nobody}, 2.0)
    assert reached["two"] == "" and "no answer" in reached["x"] and "refused" in reached["nobody"]
    rate = one.stream(two.address, 2.0)
    assert rate is not None and rate > 1 and one.stream(nobody, 1.0) is None


# ---- directions ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("slow", "named"),
    [
        ([], []),
        ([("n1", "n2")], ["n1 → n2"]),
        ([("n2", "n1"), ("n2", "n3"), ("n2", "n4")], ["from n2 to every other one"]),
        ([("n1", "n2"), ("n3", "n2"), ("n4", "n2")], ["from every other one to n2"]),
        ([(a, b) for a in NODES for b in NODES if a != b and "n3" in (a, b)], ["n3, from it and to it"]),
        ([("n2", "n1"), ("n2", "n3"), ("n2", "n4"), ("n4", "n1")], ["from n2 to every other one", "n4 → n1"]),
        ([(a, b) for a in NODES for b in NODES if a != b], ["every direction"]),
    ],
)
def test_the_slow_direction_is_named(slow: list[tuple[str, str]], named: list[str]) -> None:
    rates = all_pairs(10.0) | dict.fromkeys(slow, 0.1)
    found = name_slow(rates, 5.0, 0.5)
    assert [what for what, _ in found] == named
    assert sorted(pair for _, pairs in found for pair in pairs) == sorted(slow)
    if len(slow) < len(rates):  # without an expected rate, the best direction is the measure
        assert name_slow(rates, None, 0.5) == found


def test_of_two_nodes_the_direction_is_named_and_not_a_node() -> None:
    assert name_slow({("a", "b"): 1.0, ("b", "a"): 0.01}, None, 0.2) == [("b → a", [("b", "a")])]
    assert name_slow({}, None, 0.2) == []
