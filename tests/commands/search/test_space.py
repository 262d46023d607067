"""Draws and perturbations: every value stays in its range, and each draw depends on its seed alone."""

from __future__ import annotations

from typing import Any

import pytest
from hydra.core.override_parser.overrides_parser import OverridesParser
from hypothesis import given, settings
from hypothesis import strategies as st

from dtrain.commands.search.space import distribution, draw, explore, generator, grid, move, overrides_of

SPACE = {
    o.key_or_group: distribution(o)
    for o in OverridesParser.create().parse_overrides(
        [
            "optim.lr=tag(log,interval(1e-4,1e-1))", "optim.weight_decay=interval(0.01,0.3)",
            "schedule.warmup_steps=int(interval(2,20))", "train.max_grad_norm=range(0.5,2.1,0.25)",
            "optim.momentum=0.8,0.9,0.95",
        ]
    )
}  # fmt: skip


def is_inside(values: dict[str, Any]) -> bool:
    kinds = [type(values[key]) is (int if key == "schedule.warmup_steps" else float) for key in SPACE]
    return all(kinds) and all(found._contains(found.to_internal_repr(values[key])) for key, found in SPACE.items())


def test_no_value_leaves_its_range_in_10_000_draws() -> None:
    """A chain of perturbations, so that values get pushed against both ends."""
    values = draw(SPACE, generator(0))
    seen = []
    for i in range(10_000):
        factors = (0.5, 2.0) if i % 2 else (0.8, 1.2)
        values = explore(values, SPACE, generator("explore", i), factors, resample=0.05)
        assert is_inside(values), values
        seen.append(values)
    for key, found in SPACE.items():  # and the chain was no standstill
        numbers = {v[key] for v in seen}
        low, high = (min(found.choices), max(found.choices)) if hasattr(found, "choices") else (found.low, found.high)
        assert {low, high} <= numbers, (key, min(numbers), max(numbers))


@settings(max_examples=200, deadline=None)
@given(
    st.floats(-1e6, 1e6),
    st.floats(1e-6, 1e6),
    st.integers(0, 10**6),
    st.floats(0, 1),
    st.floats(0.01, 100).filter(lambda f: f != 1),
)
def test_any_interval_any_factor(low: float, size: float, seed: int, resample: float, factor: float) -> None:
    from optuna.distributions import FloatDistribution, IntDistribution

    space = {"a": FloatDistribution(low, low + size), "b": IntDistribution(int(low), int(low + size) + 1, step=1)}
    rng = generator(seed)
    values = draw(space, rng)
    for _ in range(5):
        values = explore(values, space, rng, (factor, 1 / factor), resample)
        assert all(found._contains(values[key]) for key, found in space.items()), values


def test_what_a_perturbation_does() -> None:
    rng = generator(1)
    moved = {move(0.01, SPACE["optim.lr"], rng, (0.8, 1.2)) for _ in range(50)}
    assert moved == {0.01 * 0.8, 0.01 * 1.2}
    assert {move(2, SPACE["schedule.warmup_steps"], rng, (0.8, 1.2)) for _ in range(50)} == {2, 3}
    assert {move(0.9, SPACE["optim.momentum"], rng, (0.8, 1.2)) for _ in range(50)} == {0.8, 0.95}


def test_a_draw_depends_on_its_seed_alone() -> None:
    assert draw(SPACE, generator(0, "trial", 3)) == draw(SPACE, generator(0, "trial", 3))
    assert draw(SPACE, generator(0, "trial", 3)) != draw(SPACE, generator(0, "trial", 4))


def test_a_grid_has_each_point_once() -> None:
    space = {key: SPACE[key] for key in ("optim.momentum", "train.max_grad_norm")}
    points = grid(space, generator(0))
    assert points is not None and len(points) == 3 * 7 and len({str(p) for p in points}) == 21
    assert points != sorted(points, key=str) and grid(SPACE, generator(0)) is None


@pytest.mark.parametrize("value", [0.1 + 0.2, 1e-5, 3, True, "fsdp"])
def test_an_override_keeps_every_bit(value: Any) -> None:
    (word,) = overrides_of({"a": value})
    parsed = OverridesParser.create().parse_override(word).value()
    assert parsed == value and type(parsed) is type(value)
