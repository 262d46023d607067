"""A file of bytes that is read back only if it is whole, for what it was written for, and private to this user.

The first line is the SHA-256 of everything after it, the second is JSON with what the bytes are for; the bytes follow.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import stat
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dtrain.util.regular_file import open_regular

SUFFIX = ".checked"
ABANDONED_S = 86400.0  # a temporary file that is older was left by a process that was killed


class UnusableFile(ValueError):
    """The file is damaged, for something else, or could have been written by another user."""


def private_folder(folder: Path) -> Path:
    """Create a folder that only this user can write to; raise UnusableFile if another user could put files there."""
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    _check_private(os.stat(folder, follow_symlinks=False), folder, stat.S_ISDIR)
    return folder


def write(path: Path, about: Mapping[str, Any], content: bytes) -> None:
    """Write a file that appears whole or not at all."""
    head = json.dumps(about, sort_keys=True).encode() + b"\n"
    checksum = hashlib.sha256(head)
    checksum.update(content)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with open(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as file:
            for part in (checksum.hexdigest().encode() + b"\n", head, content):
                file.write(part)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def read(path: Path, about: Mapping[str, Any]) -> tuple[bytes, str]:
    """Return the content and the checksum."""
    with open_regular(path, follow_symlinks=False) as file:
        _check_private(os.fstat(file.fileno()), path, stat.S_ISREG)
        checksum, _, rest = file.read().partition(b"\n")
    if hashlib.sha256(rest).hexdigest().encode() != checksum:
        raise UnusableFile(f"{path}: damaged: its checksum is wrong")
    head, _, content = rest.partition(b"\n")
    if json.loads(head) != json.loads(json.dumps(about)):
        raise UnusableFile(f"{path}: is for something else")
    with contextlib.suppress(OSError):
        os.utime(path)  # used now: `prune` removes the oldest
    return content, checksum.decode()


def prune(folder: Path, most_bytes: int) -> None:
    """Remove the files that were not used for longest until the others have at most `most_bytes` together."""
    found = []
    for path in folder.iterdir():
        with contextlib.suppress(OSError):
            status = os.stat(path, follow_symlinks=False)
            if path.name.startswith(".") and path.name.endswith(".tmp") and time.time() - status.st_mtime > ABANDONED_S:
                path.unlink()
            elif path.suffix == SUFFIX:
                found.append((status.st_mtime, status.st_size, path))
    for _, size, path in sorted(found, reverse=True):
        most_bytes -= size
        if most_bytes < 0:
            with contextlib.suppress(OSError):
                path.unlink()


def _check_private(status: os.stat_result, path: Path, is_kind: Any) -> None:
    if not is_kind(status.st_mode) or status.st_uid != os.geteuid() or status.st_mode & 0o022:
        raise UnusableFile(f"{path}: must be this user's own, and writable by nobody else")
