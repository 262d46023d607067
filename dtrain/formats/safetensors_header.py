"""Read the header of an untrusted safetensors file: return its tensors, or refuse it clearly. Imports no torch.

The format is eight bytes of length, a JSON object, then the tensors' bytes without holes. If this module accepts a
file, the tensors in its header are safe to allocate: none is larger than its bytes in the file.
"""

from __future__ import annotations

import math
import os
from pathlib import Path
from typing import Any, NamedTuple

from dtrain.formats.bounded import parse_json, short
from dtrain.util.regular_file import open_regular

LONGEST = 100_000_000  # bytes of a header: the format's own limit
MOST_TENSORS = 250_000  # in one file; the largest models have some thousand
MOST_DIMENSIONS = 64  # torch's limit
BITS = {
    "BOOL": 8, "U8": 8, "I8": 8, "U16": 16, "I16": 16, "F16": 16, "BF16": 16, "U32": 32, "I32": 32, "F32": 32,
    "U64": 64, "I64": 64, "F64": 64, "C64": 64, "F4": 4, "F6_E2M3": 6, "F6_E3M2": 6, "F8_E4M3": 8, "F8_E5M2": 8,
    "F8_E8M0": 8, "F8_E4M3FNUZ": 8, "F8_E5M2FNUZ": 8,
}  # fmt: skip


class HeaderError(ValueError):
    """Not a complete safetensors file; the message begins with the file's name."""


class Entry(NamedTuple):
    """One tensor; `begin` and `end` are byte offsets in the file."""

    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int


def read_header(path: Path, follow_symlinks: bool = False) -> dict[str, Entry]:
    """Return the tensors of a safetensors file by name. The file's length must match its header."""
    try:
        with open_regular(path, follow_symlinks) as file:
            size = os.fstat(file.fileno()).st_size
            start = file.read(8)
            length = int.from_bytes(start, "little")
            if start == b"version " and file.read(15) == b"https://git-lfs":
                raise HeaderError(f"{path.name} is a git-lfs pointer, not the file itself")
            if len(start) < 8 or length > size - 8:
                raise HeaderError(f"{path.name} is truncated, or not a safetensors file ({size:,} bytes)")
            if length > LONGEST:
                raise HeaderError(f"{path.name} has a header of {length:,} bytes, and at most {LONGEST:,} are allowed")
            text = file.read(length)
    except OSError as error:
        raise HeaderError(f"{path.name} cannot be read ({error.strerror or error})") from error
    try:
        return _entries(text, 8 + length, size)
    except ValueError as error:
        raise HeaderError(f"{path.name} is not a safetensors file ({error})") from None


def _entries(text: bytes, data: int, size: int) -> dict[str, Entry]:
    """Check and return the header's entries; `data` is where the tensors' bytes begin."""
    if not text.startswith(b"{"):
        raise ValueError("its header is not a JSON object")
    header: dict[str, Any] = parse_json(text, MOST_TENSORS + 2, 10 * MOST_TENSORS)
    metadata = header.pop("__metadata__", None)
    if not (metadata is None or (isinstance(metadata, dict) and all(type(v) is str for v in metadata.values()))):
        raise ValueError("its __metadata__ does not map names to text")
    entries = {name: _entry(name, spec, data, size) for name, spec in header.items()}
    end = data
    for name, entry in sorted(entries.items(), key=lambda item: item[1][2:]):
        if entry.begin != end:
            what = "overlaps another tensor" if entry.begin < end else "leaves a gap before it"
            raise ValueError(f"the tensor {short(name)} {what}")
        end = entry.end
    if end != size:
        raise ValueError(f"it has {size:,} bytes, and its header says {end:,}")
    return entries


def _entry(name: str, spec: Any, data: int, size: int) -> Entry:
    if not isinstance(spec, dict) or set(spec) != {"dtype", "shape", "data_offsets"}:
        raise ValueError(f"the tensor {short(name)} must have dtype, shape and data_offsets, and nothing else")
    dtype, shape, offsets = spec["dtype"], spec["shape"], spec["data_offsets"]
    if type(dtype) is not str or dtype not in BITS:
        raise ValueError(f"the tensor {short(name)} has the unknown dtype {short(dtype)}")
    if not _is_counts(shape) or len(shape) > MOST_DIMENSIONS or math.prod(max(n, 1) for n in shape) >= 2**63:
        raise ValueError(f"the tensor {short(name)} has the shape {short(shape)}")
    if not _is_counts(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
        raise ValueError(f"the tensor {short(name)} has the data_offsets {short(offsets)}")
    begin, end = offsets
    if end > size - data:  # usually an interrupted download
        raise ValueError(f"it has {size:,} bytes, and its header says {data + end:,} or more")
    bits = math.prod(shape) * BITS[dtype]
    if bits != 8 * (end - begin):
        raise ValueError(f"the tensor {short(name)} has {end - begin:,} bytes, and its shape needs {-(-bits // 8):,}")
    return Entry(dtype, tuple(shape), data + begin, data + end)


def _is_counts(values: Any) -> bool:
    return isinstance(values, list) and all(type(n) is int and n >= 0 for n in values)
