"""Figures that add up, each with its arithmetic: what a table sums, and what --explain shows."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Item:
    """One figure (bytes or seconds) of a part, and how it came about: a template and its numbers, joined on demand."""

    part: str  # memory: parameters gradients optimizer activations logits buffers fragmentation; time: as in step.py
    name: str
    value: float
    formula: str = ""  # "{} layers × {} bytes"
    numbers: tuple[object, ...] = ()

    @property
    def arithmetic(self) -> str:
        return self.formula.format(*self.numbers)


def total(items: Iterable[Item], part: str | None = None) -> float:
    """The sum of one part, or of everything."""
    return sum(item.value for item in items if part is None or item.part == part)


# What a script may ask for, whether a layout has it or not.
MEMORY_PARTS = ("parameters", "gradients", "optimizer", "activations", "logits", "buffers", "fragmentation")
TIME_PARTS = ("compute", "communication", "bubble", "optimizer", "data")


def by_part(items: Iterable[Item], named: Iterable[str] = ()) -> dict[str, float]:
    """{"total": …, part: …}: the named parts, 0 where there is nothing, and others as they appear."""
    parts = {"total": 0.0} | dict.fromkeys(named, 0.0)
    for item in items:
        parts[item.part] = parts.get(item.part, 0.0) + item.value
        parts["total"] += item.value
    return parts
