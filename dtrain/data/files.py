"""Users' files and folders: walk each once, open them compressed or not, and refuse files that are not text."""

from __future__ import annotations

import gzip
import json
import logging
import os
import re
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO, cast

from dtrain.util.regular_file import open_regular

log = logging.getLogger("dtrain")

UNREADABLE = (OSError, EOFError, zlib.error)  # errors while reading, including compressed files
LONGEST_LINE = 2**26  # bytes of a JSON line; a book has 2**20
LARGEST_STRUCTURE = 2**22  # bytes of a JSON line outside its strings: as Python objects they take 50 times as much
# Compression shrinks text to a tenth at best, logs to a hundredth, and a malicious file to a thousandth: such a file of
# 10 MB would fill the memory of every rank.
LARGEST_RATIO, UNPACKED_ALWAYS = 200, 2**26

# First bytes of files that are not plain text: without this check, training would silently use their raw bytes.
KINDS = {
    b"\x1f\x8b": "compressed by gzip",
    b"\x28\xb5\x2f\xfd": "compressed by zstd",
    b"\x04\x22\x4d\x18": "compressed by lz4",
    b"\xfd7zXZ\0": "compressed by xz",
    **{b"BZh%d1AY&SY" % level: "compressed by bzip2" for level in range(1, 10)},
    b"7z\xbc\xaf\x27\x1c": "a 7z archive",
    b"PK\x03\x04": "a zip archive",
    b"PAR1": "a Parquet table",
    b"ARROW1\0\0": "an Arrow table",
    b"\x89HDF\r\n\x1a\n": "an HDF5 file",
}
TAR = slice(257, 262)  # position of "ustar" in a tar archive


def warn(message: str) -> None:
    """Log a warning in the launcher and in rank 0 only."""
    if os.environ.get("RANK", "0") == "0":
        log.warning(message)


class _Unpacked(gzip.GzipFile):
    """A .gz file that raises an error once it unpacks to far more than any text does."""

    def __init__(self, packed: BinaryIO) -> None:
        super().__init__(fileobj=packed)
        self.myfileobj = packed  # type: ignore[assignment]  # closed with this
        self.most = LARGEST_RATIO * os.fstat(packed.fileno()).st_size + UNPACKED_ALWAYS

    def read(self, size: int | None = -1) -> bytes:
        return self._checked(super().read(size))

    def readline(self, size: int | None = -1) -> bytes:
        return self._checked(super().readline(size))

    def _checked(self, data: bytes) -> bytes:
        if self.tell() > self.most:
            raise OSError(0, f"it unpacks to more than {LARGEST_RATIO} times its size, which no text does")
        return data


def open_file(path: Path) -> BinaryIO:
    """Open a regular file; a .gz file is unpacked."""
    file = open_regular(path)
    return cast(BinaryIO, _Unpacked(file)) if path.suffix == ".gz" else file


def json_lines(path: Path) -> Iterator[tuple[int, bytes]]:
    """Yield a file's lines with their numbers; refuse a line that is too long before it is in memory."""
    with open_file(path) as file:
        number = 0
        while line := file.readline(LONGEST_LINE + 1):
            number += 1
            if len(line) > LONGEST_LINE:
                raise ValueError(
                    f"{str(path)!r} line {number} is longer than {LONGEST_LINE:,} bytes, the most that a line of JSON "
                    "may have\n  fix: write one document per line, and split long ones"
                )
            yield number, line


def parse_line(line: bytes, encoding: str | None = None) -> Any:
    """Parse a JSON line; raise ValueError or RecursionError if it is not JSON."""
    if len(line) > LARGEST_STRUCTURE:  # otherwise it is small anyway
        texts = re.compile(rb'"(?:[^"\\]++|\\.)*+(?:"|\Z)', re.DOTALL)
        if len(texts.sub(b"", line)) > LARGEST_STRUCTURE:
            raise ValueError(f"it has more than {LARGEST_STRUCTURE:,} bytes besides its texts")
    return json.loads(line if encoding is None else line.decode(encoding))


@contextmanager
def reading(path: Path) -> Iterator[BinaryIO]:
    """Open a text file; refuse one that cannot be read, or that begins like an archive or a table."""
    try:
        with open_file(path) as file:
            refuse_packed(file.read(512), path)
            file.seek(0)
            yield file
    except UNREADABLE as error:
        reason = getattr(error, "strerror", None) or error
        raise ValueError(
            f"document {str(path)!r} cannot be read ({reason})\n  fix: change its permissions, or remove it"
        ) from error


def refuse_packed(start: bytes, path: Path) -> None:
    """Refuse a compressed or binary file by its first bytes."""
    kind = next((kind for magic, kind in KINDS.items() if start.startswith(magic)), None)
    if kind is None and start[TAR] == b"ustar":
        kind = "a tar archive"
    if kind is not None:
        table = kind.endswith("table")
        fix = "load it with datasets, and save_to_disk" if table else "unpack it (only .gz is unpacked while reading)"
        raise ValueError(f"document {str(path)!r} is {kind}, not text\n  fix: {fix}")


def walk(root: Path) -> Iterator[tuple[str, list[str]]]:
    """Yield each folder under `root`, as a relative path, and its files; each once, even with links that loop.

    Folders come before links to folders, so that a folder that also has a link keeps its own name: names decide what is
    held out.
    """
    seen: set[tuple[int, int]] = set()
    links = [str(root)]
    while links:
        following, links = links, []
        for start in following:
            for folder, folders, files in os.walk(start):
                status = os.stat(folder)
                if (status.st_dev, status.st_ino) in seen:
                    folders.clear()
                    continue
                seen.add((status.st_dev, status.st_ino))
                links += sorted(path for name in folders if os.path.islink(path := os.path.join(folder, name)))
                yield os.path.relpath(folder, root), files
