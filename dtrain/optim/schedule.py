"""Learning-rate schedules: pure functions from the step to a share of the peak rate.

`step` counts from 0; warm-up rises linearly and reaches 1 at step `warmup_steps`.
Where there is a `min_ratio`, it is the last step's share.
Schedules are pure, so they have no state to save.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

from dtrain.errors import bad
from dtrain.runs.source_lines import at_return

ROUNDED = 1e-6  # what rounding may add to a share: 1 - 3 * x**2 + 2 * x**3 ends a little below 0
SMALL = 0.02  # a schedule that never reaches it probably returns the rate, not a share of the peak rate
MOST_TRIED = 500  # first steps at which a schedule of the user is tried before the first one, and of all others


def constant(step: int, steps: int, warmup_steps: int = 0) -> float:
    return _warmup(step, warmup_steps)


def linear(step: int, steps: int, warmup_steps: int = 0, min_ratio: float = 0.0) -> float:
    return _warmup(step, warmup_steps) * (1.0 - (1.0 - min_ratio) * _progress(step, steps, warmup_steps))


def cosine(step: int, steps: int, warmup_steps: int = 0, min_ratio: float = 0.0) -> float:
    half_wave = 0.5 * (1.0 + math.cos(math.pi * _progress(step, steps, warmup_steps)))
    return _warmup(step, warmup_steps) * (min_ratio + (1.0 - min_ratio) * half_wave)


def wsd(step: int, steps: int, warmup_steps: int = 0, min_ratio: float = 0.0, decay: float = 0.1) -> float:
    """Warm-up, a stable rate, and a straight line down over the last part `decay` of all steps."""
    left = (steps - 1 - step) / max(1.0, decay * steps)
    return _warmup(step, warmup_steps) * (min_ratio + (1.0 - min_ratio) * min(1.0, max(0.0, left)))


def polynomial(step: int, steps: int, warmup_steps: int = 0, min_ratio: float = 0.0, power: float = 2.0) -> float:
    left = 1.0 - _progress(step, steps, warmup_steps)
    return _warmup(step, warmup_steps) * (min_ratio + (1.0 - min_ratio) * left**power)


def staircase(step: int, steps: int, warmup_steps: int = 0, every: int = 1000, factor: float = 0.1) -> float:
    """After every `every` steps, the rate is multiplied by `factor`."""
    return _warmup(step, warmup_steps) * factor ** (step // every)


def checked(schedule: functools.partial[Any], name: str, steps: int) -> tuple[Callable[[int], float], list[str]]:
    """Return a user's schedule, which is tried before the first step and checked at each: a share, from 0 to 1.

    And a warning, if it seems to return the rate itself.
    """
    # one after another, and then some of all others: every 100th of a cycle of 100 steps would be its lowest one
    tried = {*range(min(steps, MOST_TRIED)), *range(0, steps, -(-steps // MOST_TRIED))}
    largest = max(share_of(schedule, name, step) for step in sorted(tried))
    if largest == 0 and steps > 1:
        rule = "returned 0 at every step, so nothing would be trained"
        raise refused(schedule, name, rule, f"return the share of the peak rate, from 0 to 1; {EXAMPLE}")
    warning = (
        f"schedule={name} returns at most {largest:g}: the rate is that share of the peak rate, so never more than "
        f"{largest:.2g} × optim.lr; fix: return a share from 0 to 1, and give the peak as optim.lr={largest:g}"
    )
    return functools.partial(share_of, schedule, name), [warning] if 0 < largest < SMALL and steps > 1 else []


EXAMPLE = "for example 1 - step / steps"


def share_of(schedule: functools.partial[Any], name: str, step: int) -> float:
    value = schedule(step)
    called = f"{getattr(schedule.func, '__name__', name)}({step}, {schedule.keywords.get('steps')})"
    try:
        share = float(value)
    except (TypeError, ValueError, RuntimeError) as error:
        missing = ": is a `return` missing?" if value is None else ", not a number"
        rule = f"{called} returned {value if value is None else type(value).__name__}{missing}"
        fix = f"return the share of the peak rate, from 0 to 1, {EXAMPLE}"
        raise refused(schedule, name, rule, fix) from error
    if not -ROUNDED <= share <= 1 + ROUNDED:
        rule = f"{called} returned {share:g}, but it is the share of the peak rate, from 0 to 1"
        fix = "return it divided by its largest value, and give the peak as optim.lr=…"
        raise refused(schedule, name, rule, fix if share > 1 else f"return 0 or more, {EXAMPLE}")
    return share


def refused(schedule: functools.partial[Any], name: str, rule: str, fix: str) -> ValueError:
    return at_return(bad("schedule", name, rule, fix), schedule.func)


def _warmup(step: int, warmup_steps: int) -> float:
    return min(1.0, (step + 1) / (warmup_steps + 1))


def _progress(step: int, steps: int, warmup_steps: int) -> float:
    """Return 0 until the warm-up ends, 1 at the last step."""
    return min(1.0, max(0.0, (step - warmup_steps) / max(1, steps - 1 - warmup_steps)))
