from __future__ import annotations

import math
import random

from hypothesis import given
from hypothesis import strategies as st

from dtrain.ui.curve import curve, sparkline

STEPS = [float(step) for step in range(1, 201)]
LOSS = [2 + 8 * math.exp(-step / 30) for step in STEPS]


def drawn(*args: object, **options: object) -> list[str]:
    return [line.plain.rstrip() for line in curve(*args, **options)]  # type: ignore[arg-type]


def dots(lines: list[str], column: slice = slice(None)) -> int:
    return sum(
        (ord(char) - 0x2800).bit_count() for line in lines for char in line[column] if 0x2800 <= ord(char) < 0x2900
    )


def test_a_falling_loss_falls_on_the_screen() -> None:
    lines = drawn([("loss", STEPS, LOSS)], 60, 12)
    assert len(lines) == 12 and max(map(len, lines)) <= 60
    left, right = slice(0, 20), slice(40, 60)
    assert dots(lines[:5], left) > 10 and not dots(lines[:5], right)
    assert dots(lines[5:], right) > 10
    assert [line.split(" ┤")[0].strip() for line in lines if "┤" in line] == ["8", "6", "4"]
    assert lines[-1].split()[-1] == "200"


def test_a_spike_of_one_step_is_not_averaged_away() -> None:
    x = [float(i) for i in range(100_000)]
    y = [1.0] * len(x)
    y[70_000] = 50.0
    lines = drawn([("loss", x, y)], 60, 10)
    assert all(dots([line]) for line in lines[:8])


def test_several_series_have_a_legend_and_colours() -> None:
    lines = curve([("loss", STEPS, LOSS), ("val loss", [50.0, 150.0], [5.0, 3.0])], 60, 10)
    assert lines[-1].plain.split() == ["━━", "loss", "━━", "val", "loss"]
    assert {str(span.style) for line in lines for span in line.spans} >= {"cyan", "yellow"}


def test_log_scale_leaves_out_what_has_no_logarithm() -> None:
    lines = drawn([("x", [1.0, 2.0, 3.0, 4.0], [0.0, 1.0, 100.0, math.nan])], 40, 12, log=True)
    assert [line.split("┤")[0].strip() for line in lines if "┤" in line] == ["100", "30", "10", "3", "1"]
    assert lines[-1].split()[0] == "2"


numbers = st.one_of(st.floats(), st.floats(-10, 10), st.just(10**400))


@given(
    st.lists(st.tuples(st.one_of(st.integers(0, 10**9), st.just(10**400)), numbers), max_size=30),
    st.integers(10, 200),
    st.integers(1, 40),
)
def test_any_values_fit_any_size(points: list[tuple[int, float]], width: int, height: int) -> None:
    points.sort()
    for log in (False, True):
        lines = drawn([("a", [x for x, _ in points], [y for _, y in points])], width, height, log=log)
        assert len(lines) == height and all(len(line) <= width for line in lines)


def test_sparkline() -> None:
    assert sparkline([0, 1, 2, 3, 4, 5, 6, 7], 8) == "▁▂▃▄▅▆▇█"
    assert sparkline([5.0] * 100, 10) == "▁" * 10
    assert sparkline([], 10) == sparkline([math.nan], 10) == ""
    assert len(sparkline([random.random() for _ in range(1000)], 24)) == 24
