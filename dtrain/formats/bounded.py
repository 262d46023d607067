"""Files that somebody else wrote: only regular ones are opened, and only as much is read as can be right.

Opening a FIFO waits for ever, /dev/zero never ends, and a sparse file of terabytes costs nobody anything to make.
"""

from __future__ import annotations

import json
import os
import reprlib
import stat
from pathlib import Path
from typing import Any, BinaryIO

_SHORT = reprlib.Repr()
_SHORT.maxlevel, _SHORT.maxstring = 2, 80


class NotRegular(OSError):
    """A folder, a FIFO, a socket, a device, or a link where none may be."""


def open_regular(path: Path, follow_symlinks: bool = True) -> BinaryIO:
    """Open a regular file for reading; raises an OSError for anything else, and never waits."""
    status = os.stat(path, follow_symlinks=follow_symlinks)  # first by name: opening a device may do something
    _check_kind(path, status.st_mode)
    flags = os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | (0 if follow_symlinks else os.O_NOFOLLOW)
    file = os.fdopen(os.open(path, flags), "rb")
    try:
        _check_kind(path, os.fstat(file.fileno()).st_mode)  # the name may have got another file in between
    except NotRegular:
        file.close()
        raise
    return file


def _check_kind(path: Path, mode: int) -> None:
    if stat.S_ISREG(mode):
        return
    kinds = {
        stat.S_IFDIR: "a folder", stat.S_IFLNK: "a symbolic link", stat.S_IFIFO: "a FIFO", stat.S_IFSOCK: "a socket",
        stat.S_IFCHR: "a device", stat.S_IFBLK: "a device",
    }  # fmt: skip
    raise NotRegular(0, f"it is {kinds.get(stat.S_IFMT(mode), 'something else')}, not a regular file", str(path))


def read_bytes(path: Path, most: int, follow_symlinks: bool = True) -> bytes:
    """All of a regular file; a ValueError if it has more than `most` bytes, which are not read then."""
    with open_regular(path, follow_symlinks) as file:
        data = file.read(most + 1)
    if len(data) > most:
        raise ValueError(f"it has more than {most:,} bytes")
    return data


def parse_json(data: bytes, most_objects: int = 2**20, most_values: int = 2**22) -> Any:
    """A JSON text as values; a ValueError for broken, too deep and too large ones, and for keys that come twice.

    The counts are limited before anything is parsed: a short text can take 50 times its length as Python objects.
    """
    if data.count(b"{") > most_objects or data.count(b",") > most_values:
        raise ValueError(f"it has more than {most_objects:,} objects or {most_values:,} values")
    try:
        return json.loads(data.decode(), object_pairs_hook=_without_doubles)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def read_json(path: Path, most: int, follow_symlinks: bool = True) -> Any:
    """The JSON in a regular file of at most `most` bytes; OSError or ValueError otherwise."""
    return parse_json(read_bytes(path, most, follow_symlinks))


def short(value: object) -> str:
    """A value of the file's own, fit for a message: never longer or deeper than a line can hold."""
    plain = isinstance(value, str) and value.isprintable() and 0 < len(value) <= 80
    return str(value) if plain else _SHORT.repr(value)


def _without_doubles(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        seen: set[str] = set()
        double = next(key for key, _ in pairs if key in seen or seen.add(key))  # type: ignore[func-returns-value]
        raise ValueError(f"the key {short(double)} comes twice")
    return found
