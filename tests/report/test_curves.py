"""Curves for the page: buckets keep the smallest and the largest value, so that no spike is lost."""

from __future__ import annotations

import json
import math
from itertools import accumulate

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dtrain.report.curves import columns, curve, rounded

VALUES = st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=300)


@given(VALUES, st.integers(1, 50))
def test_each_bucket_keeps_its_extremes(ys: list[float], most: int) -> None:
    found = curve(list(range(len(ys))), ys, most)
    assert len(found["y"]) <= most or len(found["y"]) == len(ys) <= most
    lo, hi = found.get("lo", found["y"]), found.get("hi", found["y"])
    assert min(lo) == rounded(min(ys)) and max(hi) == rounded(max(ys))
    size = math.ceil(len(ys) / most)
    for i, (low, mean, high) in enumerate(zip(lo, found["y"], hi, strict=True)):
        bucket = ys[i * size : (i + 1) * size]
        assert low == rounded(min(bucket)) and high == rounded(max(bucket))
        assert mean == pytest.approx(sum(bucket) / len(bucket), rel=1e-4, abs=1e-4)


@given(st.lists(st.integers(0, 2**52), min_size=1, unique=True, max_size=100), st.integers(1, 30))
def test_places_come_back_from_their_differences(xs: list[int], most: int) -> None:
    xs.sort()
    places = list(accumulate(curve(xs, [1.0] * len(xs), most)["x"]))
    assert set(places) <= set(xs) and places == sorted(places)
    if len(xs) <= most:
        assert places == xs


def test_a_spike_of_one_step_among_ten_thousand_is_kept() -> None:
    ys = [1.0] * 10_000
    ys[6_543] = 99.0
    found = curve(range(10_000), ys, 300)
    assert max(found["hi"]) == 99 and max(found["y"]) < 10


def test_columns_take_numbers_only_and_in_order() -> None:
    lines = [{"step": 1, "loss": 2.0, "text": "x", "list": [1], "flag": True}, {"step": 2, "loss": None}]
    lines += [{"step": 3, "loss": float("nan")}, {"step": 4, "loss": float("inf")}, {"step": "5", "loss": 1.0}]
    lines += [{"loss": 1.0}, {"step": True, "loss": 1.0}, {"step": 10**400, "loss": 1.0}, {"step": 6, "loss": 10**400}]
    lines += [{"step": 7, "loss": 1}, {"step": 5, "loss": 0.5}]
    assert columns(lines)["loss"] == ([1, 7], [2.0, 1])
    assert set(columns(lines)) == {"step", "loss"}


@given(st.floats(allow_nan=False, allow_infinity=False))
def test_rounding_keeps_five_digits_and_is_json(value: float) -> None:
    assert json.loads(json.dumps(rounded(value))) == pytest.approx(value, rel=1e-4)
