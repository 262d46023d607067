"""Read untrusted files: only regular files are opened, and only up to a plausible size is read.

Opening a FIFO blocks forever, /dev/zero never ends, and a sparse file of terabytes is trivial to make.
"""

from __future__ import annotations

import json
import reprlib
from pathlib import Path
from typing import Any

from dtrain.util.regular_file import open_regular

_SHORT = reprlib.Repr()
_SHORT.maxlevel, _SHORT.maxstring = 2, 80


def read_bytes(path: Path, most: int, follow_symlinks: bool = True) -> bytes:
    """Read a whole regular file; raise a ValueError without reading more if it exceeds `most` bytes."""
    with open_regular(path, follow_symlinks) as file:
        data = file.read(most + 1)
    if len(data) > most:
        raise ValueError(f"it has more than {most:,} bytes")
    return data


def parse_json(data: bytes, most_objects: int = 2**20, most_values: int = 2**22) -> Any:
    """Parse JSON; raise a ValueError if it is broken, too deep or too large, or has duplicate keys.

    The counts are limited before parsing: a short text can take 50 times its length as Python objects.
    """
    if data.count(b"{") > most_objects or data.count(b",") > most_values:
        raise ValueError(f"it has more than {most_objects:,} objects or {most_values:,} values")
    try:
        return json.loads(data.decode(), object_pairs_hook=_without_doubles)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def read_json(path: Path, most: int, follow_symlinks: bool = True) -> Any:
    """Parse the JSON in a regular file of at most `most` bytes; raise OSError or ValueError otherwise."""
    return parse_json(read_bytes(path, most, follow_symlinks))


def short(value: object) -> str:
    """Return a value from the file for use in a message: never longer or deeper than fits in a line."""
    plain = isinstance(value, str) and value.isprintable() and 0 < len(value) <= 80
    return str(value) if plain else _SHORT.repr(value)


def _without_doubles(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        seen: set[str] = set()
        double = next(key for key, _ in pairs if key in seen or seen.add(key))  # type: ignore[func-returns-value]
        raise ValueError(f"the key {short(double)} comes twice")
    return found
