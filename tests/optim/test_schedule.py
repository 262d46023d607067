"""Schedules: a pure function of the step, up during the warm-up, down to min_ratio at the last step."""

import functools
import itertools
import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dtrain.config.build import build
from dtrain.optim.schedule import checked, constant, cosine, linear, polynomial, staircase, wsd

DECAYING = [linear, cosine, polynomial]
ratios = st.floats(0, 1)


@st.composite
def runs(draw: st.DrawFn) -> tuple[int, int]:
    """(steps, warmup_steps) where the warm-up ends before the last step."""
    steps = draw(st.integers(2, 80))
    return steps, draw(st.integers(0, steps - 2))


@pytest.mark.parametrize("schedule", DECAYING)
@given(run=runs(), min_ratio=ratios)
def test_the_shape(schedule: Any, run: tuple[int, int], min_ratio: float) -> None:
    steps, warmup = run
    shares = [schedule(step, steps, warmup, min_ratio) for step in range(steps)]
    rising, falling = shares[: warmup + 1], shares[warmup:]
    assert all(a < b for a, b in itertools.pairwise(rising)), "the warm-up rises at every step"
    assert shares[0] > 0, "the first step trains"
    assert shares[warmup] == pytest.approx(1, abs=1e-12), "the peak is at step warmup_steps"
    assert all(a >= b for a, b in itertools.pairwise(falling)), "after it, never up again"
    assert shares[-1] == pytest.approx(min_ratio, abs=1e-12), "the last step has min_ratio"
    assert all(min(min_ratio, shares[0]) - 1e-12 <= share <= 1 + 1e-12 for share in shares)


@pytest.mark.parametrize("schedule", DECAYING)
@given(run=runs(), min_ratio=ratios, beyond=st.integers(0, 1000))
def test_beyond_the_last_step_it_stays_at_min_ratio(
    schedule: Any, run: tuple[int, int], min_ratio: float, beyond: int
) -> None:
    steps, warmup = run
    assert schedule(steps + beyond, steps, warmup, min_ratio) == pytest.approx(min_ratio, abs=1e-12)


@given(st.integers(0, 400), st.integers(1, 300), st.integers(0, 300))
def test_constant_has_only_a_warm_up(step: int, steps: int, warmup: int) -> None:
    assert constant(step, steps, warmup) == min(1.0, (step + 1) / (warmup + 1))


@given(st.integers(0, 400), st.integers(1, 300), st.integers(0, 500), ratios)
def test_any_settings_give_a_share(step: int, steps: int, warmup: int, min_ratio: float) -> None:
    """Also a warm-up longer than the run, and a run of one step."""
    for schedule in DECAYING:
        assert 0 <= schedule(step, steps, warmup, min_ratio) <= 1 + 1e-12


@given(runs(), ratios, st.floats(0.01, 1))
def test_wsd_is_constant_until_its_decay(run: tuple[int, int], min_ratio: float, decay: float) -> None:
    steps, warmup = run
    shares = [wsd(step, steps, warmup, min_ratio, decay) for step in range(steps)]
    assert shares[-1] == pytest.approx(min_ratio, abs=1e-12)
    stable = range(warmup, math.floor(steps - 1 - max(1.0, decay * steps)) + 1)
    assert all(shares[step] == 1 for step in stable)
    assert all(a >= b for a, b in itertools.pairwise(shares[warmup:])), "after the warm-up, never up again"


@given(st.integers(0, 400), st.integers(1, 100), st.floats(0.1, 1))
def test_a_staircase_falls_by_its_factor(step: int, every: int, factor: float) -> None:
    assert staircase(step + every, 1000, 0, every, factor) == pytest.approx(
        factor * staircase(step, 1000, 0, every, factor)
    )


def test_known_values() -> None:
    assert [linear(s, 5, 0, 0.0) for s in range(5)] == [1.0, 0.75, 0.5, 0.25, 0.0]
    assert [linear(s, 4, 2, 0.5) for s in range(4)] == [1 / 3, 2 / 3, 1.0, 0.5]
    assert cosine(2, 5, 0, 0.0) == pytest.approx(0.5)
    assert cosine(1, 5, 0, 0.2) == pytest.approx(0.2 + 0.8 * (1 + math.cos(math.pi / 4)) / 2)


@given(run=runs(), name=st.sampled_from(["constant", "linear", "cosine"]), data=st.data())
def test_a_resumed_run_goes_on_with_the_same_rates(run: tuple[int, int], name: str, data: st.DataObject) -> None:
    """Built anew at any step, as a resume does, it gives what the uninterrupted run would have had."""
    steps, warmup = run
    node: dict[str, Any] = {"_target_": f"dtrain.optim.schedule.{name}", "_partial_": True, "warmup_steps": warmup}
    whole = [build(node, steps=steps)(step) for step in range(steps)]
    resumed_at = data.draw(st.integers(0, steps - 1))
    again = build(node, steps=steps)
    assert [again(step) for step in range(resumed_at, steps)] == whole[resumed_at:]


def cycle(step: int, steps: int) -> float:
    return (step % 100) / 100


def rounded(step: int, steps: int) -> float:
    x = step / (steps - 1)
    return (1 - 3 * x**2 + 2 * x**3) - 1e-16


@pytest.mark.parametrize("schedule", [cycle, rounded])
def test_a_schedule_that_returns_to_zero_is_used_as_it_is(schedule: Any) -> None:
    share, warnings = checked(functools.partial(schedule, steps=100_000), "my.schedule", 100_000)
    assert [share(step) for step in (0, 50, 99_999)] == [schedule(step, 100_000) for step in (0, 50, 99_999)]
    assert not warnings
