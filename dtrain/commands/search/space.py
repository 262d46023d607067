"""The search space: Hydra's sweep syntax as optuna distributions, random draws, and PBT's perturbations.

All functions are pure: a random generator is an argument, and each draw of a search has its own seed. So a search that
is killed and continued draws the same values.
"""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from hydra.core.override_parser.types import ChoiceSweep, IntervalSweep, Override, RangeSweep

from dtrain.errors import bad

if TYPE_CHECKING:
    from optuna.distributions import BaseDistribution

Value = bool | int | float | str
Values = dict[str, Value]
Space = Mapping[str, "BaseDistribution"]
LARGEST_GRID = 10_000  # combinations; a larger grid is sampled with replacement


def distribution(override: Override) -> BaseDistribution:
    """Convert Hydra's sweep syntax to an optuna distribution."""
    from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution

    sweep = override.value()
    if isinstance(sweep, ChoiceSweep):
        values = [str(getattr(item, "text", item)) if isinstance(item, str) else item for item in sweep.list]
        return CategoricalDistribution([v if isinstance(v, (bool, int, float)) else str(v) for v in values])
    if isinstance(sweep, IntervalSweep):
        assert sweep.start is not None and sweep.end is not None
        if isinstance(sweep.start, int) and isinstance(sweep.end, int):
            return IntDistribution(sweep.start, sweep.end, log="log" in sweep.tags)
        return FloatDistribution(float(sweep.start), float(sweep.end), log="log" in sweep.tags)
    if isinstance(sweep, RangeSweep) and sweep.start is not None and sweep.stop is not None:
        last = sweep.start + (math.ceil((sweep.stop - sweep.start) / sweep.step) - 1) * sweep.step
        if all(isinstance(n, int) for n in (sweep.start, last, sweep.step)):
            return IntDistribution(int(sweep.start), int(last), step=int(sweep.step))
        return FloatDistribution(float(sweep.start), float(last), step=float(sweep.step))
    key = override.key_or_group
    raise bad(key, override.input_line, "cannot be searched", f"{key}=choice(…), interval(…) or range(…)")


def overrides_of(values: Mapping[str, Value]) -> list[str]:
    """Return values as overrides. Floats keep every bit: Python writes as many digits as that takes."""
    return [f"{key}={str(value).lower() if isinstance(value, bool) else value}" for key, value in values.items()]


def generator(*seeds: object) -> random.Random:
    """Return the random generator of one decision, e.g. of (seed, "trial", 3)."""
    return random.Random(" ".join(map(str, seeds)))


def draw(space: Space, rng: random.Random) -> Values:
    """Draw each setting from its range."""
    return {key: draw_one(found, rng) for key, found in space.items()}


def holds(space: Space, values: Any) -> bool:
    """Return whether these are values of all settings, each within its range."""
    return isinstance(values, dict) and values.keys() == space.keys() and all(
        within(found, values[key]) for key, found in space.items()
    )  # fmt: skip


def within(found: Any, value: Any) -> bool:
    if hasattr(found, "choices"):
        return any(type(value) is type(choice) and value == choice for choice in found.choices)
    kinds = (int,) if isinstance(found.low, int) else (int, float)
    return type(value) in kinds and found.low <= value <= found.high


def draw_one(found: Any, rng: random.Random) -> Value:
    if hasattr(found, "choices"):
        return rng.choice(found.choices)
    if found.log:
        return fit(found, math.exp(rng.uniform(math.log(found.low), math.log(found.high))))
    if found.step:
        return fit(found, found.low + found.step * rng.randrange(num_steps(found) + 1))
    return fit(found, rng.uniform(found.low, found.high))


def num_steps(found: Any) -> int:
    """Return the number of steps from the low end of a stepped range to its high end."""
    return round((found.high - found.low) / found.step)


def fit(found: Any, number: float) -> int | float:
    """Return the value of a numeric range that is nearest to a number."""
    number = min(max(number, found.low), found.high)
    if found.step:
        number = found.low + found.step * round((number - found.low) / found.step)
        number = min(number, found.high)  # the last step may end beyond the range by a rounding error
    return round(number) if isinstance(found.low, int) else float(number)


def grid(space: Space, rng: random.Random) -> list[Values] | None:
    """Return all combinations in random order; None if a setting has a plain interval, not a list of values."""
    lists = [values_of(found) for found in space.values()]
    if any(values is None for values in lists) or math.prod(len(values or ()) for values in lists) > LARGEST_GRID:
        return None
    points = [dict(zip(space, point, strict=True)) for point in itertools.product(*lists)]  # type: ignore[arg-type]
    rng.shuffle(points)
    return points


def values_of(found: Any) -> Sequence[Value] | None:
    if hasattr(found, "choices"):
        return list(found.choices)
    if not found.step or found.log:
        return None
    return [fit(found, found.low + i * found.step) for i in range(min(num_steps(found), LARGEST_GRID) + 1)]


def explore(values: Values, space: Space, rng: random.Random, factors: Sequence[float], resample: float) -> Values:
    """Perturb each value: redraw it with probability `resample`, else move it by one of the factors, in its range."""
    return {
        key: draw_one(found, rng) if rng.random() < resample else move(values[key], found, rng, factors)
        for key, found in space.items()
    }


def move(value: Value, found: Any, rng: random.Random, factors: Sequence[float]) -> Value:
    """Multiply a number by one of the factors; choose a neighbour in a list. A whole number moves by at least one."""
    factor = rng.choice(factors)
    if hasattr(found, "choices"):
        place = found.choices.index(value) + (1 if factor > 1 else -1)
        return found.choices[min(max(place, 0), len(found.choices) - 1)]
    assert isinstance(value, (int, float))
    moved = fit(found, value * factor)
    if moved == value and found.step:
        moved = fit(found, value + math.copysign(found.step, factor - 1))
    return moved
