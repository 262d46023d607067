"""Collectives as a line: what a hardware file predicts, and what measurements say back."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dtrain.config.hardware import load
from dtrain.plan.calibrate import link_fit
from dtrain.plan.time.collectives import STEPS, Group, collective_s

DATA = Path(__file__).parents[3] / "benchmarks" / "planner" / "data" / "nccl_curves.csv"
SIZES = (64 * 2**10, 2**20, 16 * 2**20, 256 * 2**20, 2**30)


@given(st.floats(1, 500), st.floats(0.5, 100), st.floats(1, 900), st.integers(3, 16))
def test_what_a_ring_would_take_is_found_again(fixed: float, hop: float, gb_s: float, ranks: int) -> None:
    def row(name: str, n: int, size: int) -> dict[str, Any]:
        us = fixed + (n - 1) * STEPS[name] * hop + link_fit.bus_bytes(name, n, size) / gb_s / 1e3
        return {"collective": name, "ranks": n, "bytes": size, "us": us}

    rows = [row("all_reduce", 2, size) for size in SIZES]
    rows += [row(name, ranks, size) for name in ("all_reduce", "all_gather") for size in SIZES]
    found = link_fit.link_values(rows)
    assert found["nvlink_max_gb_s"] == pytest.approx(gb_s, rel=1e-3)
    assert found["gather_max_gb_s"] == pytest.approx(gb_s, rel=1e-3)
    assert found["collective_us"] == pytest.approx(fixed, rel=0.02, abs=0.2)
    assert found["nvlink_latency_us"] == pytest.approx(hop, rel=0.02, abs=0.2)
    assert found["nvlink_busbw_gb_s"] < gb_s


@given(st.lists(st.tuples(st.floats(1, 1e9), st.floats(1e-6, 10)), min_size=2, max_size=8))
def test_a_line_never_promises_negative_time(points: list[tuple[float, float]]) -> None:
    start, slope = link_fit.line(points)
    assert start >= 0 and slope >= 0


def test_nothing_measured_says_nothing() -> None:
    assert link_fit.link_values([]) == {}


# ---- against what was published ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name", ["h100", "h200", "a100-80gb", "gcp-a3-mega", "gcp-a3-ultra", "aws-p6-b200", "aws-p5en"]
)
def test_large_messages_are_as_fast_as_published(name: str) -> None:
    with open(DATA) as file:
        rows = list(csv.DictReader(line for line in file if not line.startswith("#")))
    # 2 nodes reduce with half the traffic of a ring, as a tree of them has one edge only: not predicted
    large = [r for r in rows if r["hardware"] == name and int(r["bytes"]) >= 4 * 2**30]
    large = [r for r in large if (r["collective"], r["nodes"]) != ("all_reduce", "2")]
    assert large
    for row in large:
        group = Group(int(row["ranks"]), int(row["ranks"]) // int(row["nodes"]))
        seconds = collective_s(load(name), row["collective"], group, int(row["bytes"]))
        assert seconds == pytest.approx(float(row["us"]) / 1e6, rel=0.13), row
