"""Values that add up, each with its arithmetic: for the sums of a table and for --explain."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Item:
    """One value (bytes or seconds) of a part, with its arithmetic: a template and its numbers, formatted on demand."""

    part: str  # memory: parameters gradients optimizer activations logits buffers fragmentation; time: as in step.py
    name: str
    value: float
    formula: str = ""  # "{} layers × {} bytes"
    numbers: tuple[object, ...] = ()

    @property
    def arithmetic(self) -> str:
        return self.formula.format(*self.numbers)


def total(items: Iterable[Item], part: str | None = None) -> float:
    """Sum one part, or everything."""
    return sum(item.value for item in items if part is None or item.part == part)


# Keys that --json always has, whether a layout uses them or not.
MEMORY_PARTS = ("parameters", "gradients", "optimizer", "activations", "logits", "buffers", "fragmentation")
TIME_PARTS = ("compute", "communication", "bubble", "optimizer", "data")


def by_part(items: Iterable[Item], named: Iterable[str] = ()) -> dict[str, float]:
    """{"total": …, part: …}: the named parts, 0 if unused, and other parts as they appear."""
    parts = {"total": 0.0} | dict.fromkeys(named, 0.0)
    for item in items:
        parts[item.part] = parts.get(item.part, 0.0) + item.value
        parts["total"] += item.value
    return parts
