"""Curves small enough for a page: many steps become buckets, and each bucket keeps its mean, minimum and maximum."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import pairwise
from math import inf
from typing import Any

LARGEST_INTEGER = 2**53  # the largest whole number that JavaScript holds exactly
LARGEST_VALUE = 1e300  # larger numbers overflow in sums
Curve = dict[str, Any]
Column = tuple[list[float], list[float]]  # places and values of a metric


def columns(rows: Iterable[dict[str, Any]], x: str = "step") -> dict[str, Column]:
    """Return the places and values of every metric. What is missing, not finite or out of order is left out."""
    found: dict[str, Column] = {}
    for row in rows:
        place = row.get(x)
        if type(place) not in (int, float) or not -LARGEST_INTEGER < place < LARGEST_INTEGER:  # type: ignore[operator]
            continue
        for name, value in row.items():
            # no function calls here: a page of 50 runs has millions of values
            if (type(value) is float or type(value) is int) and -LARGEST_VALUE < value < LARGEST_VALUE:
                xs, ys = found.get(name) or found.setdefault(name, ([], []))
                if not xs or place >= xs[-1]:  # type: ignore[operator]
                    xs.append(place)  # type: ignore[arg-type]
                    ys.append(value)
    return found


def curve(xs: Sequence[float], ys: Sequence[float], most: int, digits: int = 5) -> Curve:
    """Return x as differences, y and the last y. More than `most` points become buckets, with their mean, min and max.

    Digits: significant ones; five are more than a screen shows.
    """

    def short(value: float) -> float:
        return rounded(value, digits)

    size = -(-len(xs) // most)
    if size <= 1:
        return {"x": differences(xs), "y": [short(y) for y in ys]}
    buckets = [ys[i : i + size] for i in range(0, len(ys), size)]
    middles = [xs[min(i + size // 2, len(xs) - 1)] for i in range(0, len(xs), size)]
    return {
        "x": differences(middles),
        "y": [short(sum(bucket) / len(bucket)) for bucket in buckets],
        "lo": [short(min(bucket)) for bucket in buckets],
        "hi": [short(max(bucket)) for bucket in buckets],
        "ends": [short_place(xs[0]), short_place(xs[-1])],
        "last": short(ys[-1]),
    }


def differences(xs: Sequence[float]) -> list[float]:
    """The first place and then the distances: nearly constant, so they compress to almost nothing."""
    places = [short_place(x) for x in xs]
    return [*places[:1], *(short_place(b - a) for a, b in pairwise(places))]


def short_place(x: float) -> float:
    return int(x) if x == int(x) else round(x, 3)


def rounded(value: float, digits: int = 5) -> float:
    found = float(f"{value:.{digits}g}")
    if abs(found) == inf:  # rounded up beyond the largest number
        return value
    return int(found) if found.is_integer() and abs(found) < 1e15 else found
