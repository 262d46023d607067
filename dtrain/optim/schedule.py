"""Learning-rate schedules: pure functions from the step to a share of the peak rate.

`step` counts from 0; warm-up rises linearly and reaches 1 at step `warmup_steps`.
Where there is a `min_ratio`, it is the last step's share.
Schedules are pure, so they have no state to save.
"""

from __future__ import annotations

import math


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


def _warmup(step: int, warmup_steps: int) -> float:
    return min(1.0, (step + 1) / (warmup_steps + 1))


def _progress(step: int, steps: int, warmup_steps: int) -> float:
    """Return 0 until the warm-up ends, 1 at the last step."""
    return min(1.0, max(0.0, (step - warmup_steps) / max(1, steps - 1 - warmup_steps)))
