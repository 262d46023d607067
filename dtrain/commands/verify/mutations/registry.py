"""The mutations by name, and how one replaces a function of the real code."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

MUTATIONS: dict[str, Callable[[], None]] = {}


def mutation(function: Callable[[], None]) -> Callable[[], None]:
    MUTATIONS[function.__name__.replace("_", "-")] = function
    return function


def replace(owner: Any, name: str, make: Callable[[Any], Any]) -> None:
    """Replace a function by what `make` returns for it."""
    usual = getattr(owner, name)
    setattr(owner, name, functools.wraps(usual)(make(usual)))


def after(owner: Any, name: str, more: Callable[..., object]) -> None:
    """Do more after a method, which returns what it did."""

    def make(usual: Any) -> Any:
        def both(self: Any, *arguments: Any, **named: Any) -> Any:
            result = usual(self, *arguments, **named)
            more(self)
            return result

        return both

    replace(owner, name, make)
