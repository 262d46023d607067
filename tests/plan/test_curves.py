"""Collectives as a line: what a hardware file predicts, and what measurements say back."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dtrain.hardware import Hardware, section
from dtrain.plan import curves

DATA = Path(__file__).parents[2] / "benchmarks" / "planner" / "data" / "nccl_curves.csv"
SIZES = (64 * 2**10, 2**20, 16 * 2**20, 256 * 2**20, 2**30)


@given(st.floats(1, 500), st.floats(0.5, 100), st.floats(1, 900), st.integers(3, 16))
def test_what_a_ring_would_take_is_found_again(fixed: float, hop: float, gb_s: float, ranks: int) -> None:
    def row(name: str, n: int, size: int) -> dict[str, Any]:
        us = fixed + curves.hops(name, n)[0] * hop + curves.bus_bytes(name, n, size) / gb_s / 1e3
        return {"collective": name, "ranks": n, "bytes": size, "us": us}

    rows = [row("all_reduce", 2, size) for size in SIZES]
    rows += [row(name, ranks, size) for name in ("all_reduce", "all_gather") for size in SIZES]
    found = curves.link_figures(rows)
    assert found["nvlink_max_gb_s"] == pytest.approx(gb_s, rel=1e-3)
    assert found["gather_max_gb_s"] == pytest.approx(gb_s, rel=1e-3)
    assert found["collective_us"] == pytest.approx(fixed, rel=0.02, abs=0.2)
    assert found["nvlink_latency_us"] == pytest.approx(hop, rel=0.02, abs=0.2)
    assert found["nvlink_busbw_gb_s"] < gb_s


@given(st.lists(st.tuples(st.floats(1, 1e9), st.floats(1e-6, 10)), min_size=2, max_size=8))
def test_a_line_never_promises_negative_time(points: list[tuple[float, float]]) -> None:
    start, slope = curves.line(points)
    assert start >= 0 and slope >= 0


def test_hops_are_those_of_nccl() -> None:
    assert curves.hops("all_reduce", 8) == (14, 0)
    assert curves.hops("all_reduce", 16, nodes=2) == (26, 4)
    assert curves.hops("all_gather", 16, nodes=2) == (14, 1)
    assert curves.link_figures([]) == {}


# ---- forward -------------------------------------------------------------------------------------------------


def load(name: str) -> Hardware:
    return Hardware(**{k: v for k, v in section(name).items() if k != "_target_"})


@given(st.sampled_from(["selene", "aws-p5", "gcp-a3-ultra"]), st.integers(1, 8), st.floats(1, 2**34))
def test_more_bytes_and_more_nodes_take_longer(name: str, nodes: int, num_bytes: float) -> None:
    def seconds(nodes: int, num_bytes: float) -> float:
        return curves.collective_s(load(name), "all_gather", 8 * nodes, nodes, num_bytes) or 0.0

    assert 0 < seconds(nodes, num_bytes) < seconds(nodes, 2 * num_bytes)
    assert seconds(nodes, num_bytes) < seconds(nodes + 1, num_bytes)


def test_two_nodes_reduce_with_half_the_traffic() -> None:
    two, three = (curves.collective_s(load("selene"), "all_reduce", 8 * n, n, 2**34) or 0.0 for n in (2, 3))
    assert two < 0.9 * three, "as fast as NVLink lets it be, which is less than twice the adapters"


def test_unknown_links_are_not_guessed() -> None:
    assert curves.collective_s(load("unknown"), "all_reduce", 8, 1, 1e6) is None
    assert curves.collective_s(load("h100"), "all_reduce", 16, 2, 1e6) is None, "h100 does not say its network"


@pytest.mark.parametrize("name", ["h100", "h200", "a100-80gb", "aws-p5", "gcp-a3-mega", "gcp-a3-ultra", "aws-p6-b200"])
def test_large_messages_are_as_fast_as_published(name: str) -> None:
    with open(DATA) as file:
        rows = list(csv.DictReader(line for line in file if not line.startswith("#")))
    large = [r for r in rows if r["hardware"] == name and int(r["bytes"]) >= 4 * 2**30]
    assert large
    for row in large:
        shape = (row["collective"], int(row["ranks"]), int(row["nodes"]), int(row["bytes"]))
        seconds = curves.collective_s(load(name), *shape)
        assert seconds == pytest.approx(float(row["us"]) / 1e6, rel=0.13), row
