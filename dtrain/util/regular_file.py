"""Open regular files only: a FIFO with the name of a log blocks its reader forever, and /dev/zero never ends."""

from __future__ import annotations

import os
import stat
from contextlib import suppress
from io import BufferedReader
from pathlib import Path

KINDS = {
    stat.S_IFDIR: "a folder", stat.S_IFLNK: "a symbolic link", stat.S_IFIFO: "a FIFO", stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device", stat.S_IFBLK: "a device",
}  # fmt: skip


class NotRegular(OSError):
    """A folder, a FIFO, a socket, a device, or a forbidden link."""


def regular(path: str | Path, flags: int) -> int:
    """An opener for `open`, for reading and for writing: raise NotRegular for anything else, and never block."""
    with suppress(FileNotFoundError):  # it may be created
        mode = os.stat(path, follow_symlinks=not flags & os.O_NOFOLLOW).st_mode
        _check_kind(path, mode)  # first by name: opening a device may have side effects
    descriptor = os.open(path, flags | os.O_NONBLOCK | os.O_CLOEXEC, 0o666)
    try:
        _check_kind(path, os.fstat(descriptor).st_mode)  # the name may point to another file by now
    except NotRegular:
        os.close(descriptor)
        raise
    return descriptor


def open_regular(path: Path, follow_symlinks: bool = True) -> BufferedReader:
    """Open a regular file for reading."""
    return os.fdopen(regular(path, os.O_RDONLY | (0 if follow_symlinks else os.O_NOFOLLOW)), "rb")


def read_bytes(path: Path) -> bytes:
    """Path.read_bytes of a regular file."""
    with open_regular(path) as file:
        return file.read()


def _check_kind(path: str | Path, mode: int) -> None:
    if not stat.S_ISREG(mode):
        raise NotRegular(0, f"it is {KINDS.get(stat.S_IFMT(mode), 'something else')}, not a regular file", str(path))
