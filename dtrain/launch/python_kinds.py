"""Say what kind of thing a script gives as an argument: a class, an object, an array, a thing with its settings."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Mapping
from pathlib import Path
from typing import Any


def is_with_settings(value: Any) -> bool:
    """Is it (Class, {"name": value}), and not several things?"""
    return isinstance(value, tuple) and len(value) == 2 and isinstance(value[1], Mapping)


def is_code(thing: Any) -> bool:
    return inspect.isclass(thing) or inspect.isroutine(thing)


def is_tensor(value: Any) -> bool:
    return type(value).__name__ == "Tensor" and type(value).__module__.partition(".")[0] == "torch"


def holds_objects(value: Any) -> bool:
    """Is it, or does it contain, more than a configuration can hold?"""
    if isinstance(value, (Mapping, list, tuple)):
        return any(map(holds_objects, value.values() if isinstance(value, Mapping) else value))
    is_scalar = hasattr(type(value), "item") and getattr(value, "ndim", None) == 0  # of numpy
    return not (value is None or is_scalar or isinstance(value, (bool, int, float, str, Path)))


def is_object(value: Any) -> bool:
    """Is it an object that the script made, in place of a class or an option?"""
    return not (isinstance(value, (str, Mapping, list, tuple, functools.partial)) or value is None or is_code(value))


def is_bunch(thing: Any) -> bool:
    """Is it scikit-learn's, as load_digits() gives it?"""
    return isinstance(thing, Mapping) and {"data", "target"} <= thing.keys()


def is_array(thing: Any) -> bool:
    """Is it an array, a tensor or a pandas table, each with one row for each sample?"""
    return (hasattr(thing, "dtype") or hasattr(thing, "iloc")) and len(getattr(thing, "shape", ())) > 0
