"""Tensors in files: safetensors written with a checksum and flushed to disk, and read back piece by piece.

The format is eight bytes of header length, a JSON header, the bytes of the tensors. Writing it here, tensor by tensor,
gives the checksum of exactly the bytes written, without holding a second copy of a shard in memory.
"""

from __future__ import annotations

import errno
import hashlib
import json
import math
import os
import shutil
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

DTYPES = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16", torch.int64: "I64",
    torch.int32: "I32", torch.int16: "I16", torch.int8: "I8", torch.uint8: "U8", torch.bool: "BOOL",
}  # fmt: skip
# Small enough that a block is written from the cache that its hash brought it into, large enough that a thread which
# writes asks for Python's lock, which the training needs, only some hundred times a second.
BLOCK = 8 * 2**20


def is_dtensor(tensor: Tensor) -> bool:
    """Told by its looks: importing torch.distributed.tensor takes 0.8 s, and who has a DTensor has paid already."""
    return hasattr(tensor, "placements")


@dataclass(frozen=True, eq=False)
class Chunk:
    """A box of a named tensor that this rank holds: its live values, and where it begins in the whole."""

    values: Tensor
    whole_shape: tuple[int, ...]
    offset: tuple[int, ...]

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.values.shape)

    @property
    def box(self) -> tuple[slice, ...]:
        """The place in the whole: `whole[chunk.box]` has the shape of the values."""
        return tuple(slice(o, o + n) for o, n in zip(self.offset, self.shape, strict=True))

    @property
    def nbytes(self) -> int:
        return self.values.numel() * self.values.element_size()


Held = Tensor | list[Chunk]  # what a rank holds of a named tensor: all of it, a DTensor's shard, or some boxes


def chunks_of(held: Held) -> list[Chunk]:
    if isinstance(held, list):
        return held
    if is_dtensor(held):
        from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

        dtensor: Any = held
        _, offset = compute_local_shape_and_global_offset(held.shape, dtensor.device_mesh, dtensor.placements)
        return [Chunk(dtensor.to_local(), tuple(held.shape), tuple(offset))]
    return [Chunk(held, tuple(held.shape), (0,) * held.dim())]


def flat_chunks(values: Tensor, whole_shape: tuple[int, ...], begin: int) -> list[Chunk]:
    """The boxes that a run of elements of the flattened whole is made of, as views of `values`.

    DeepSpeed cuts a weight without regard to its rows. Of a matrix such a run is at most three boxes: the rest of a
    row, whole rows, the start of a row; each more dimension adds two.
    """
    if len(whole_shape) <= 1 or not values.numel():
        offset = (begin,) if whole_shape else ()
        return [Chunk(values.view(values.shape if whole_shape else ()), whole_shape, offset)] if values.numel() else []
    row_shape = whole_shape[1:]
    row = math.prod(row_shape)
    boxes: list[Chunk] = []
    at, end = begin, begin + values.numel()
    while at < end:
        if at % row == 0 and end - at >= row:  # whole rows
            stop = end - end % row
            rows = values[at - begin : stop - begin].view(-1, *row_shape)
            boxes.append(Chunk(rows, whole_shape, (at // row, *(0 for _ in row_shape))))
        else:
            stop = min(end, at - at % row + row)
            for part in flat_chunks(values[at - begin : stop - begin], row_shape, at % row):
                boxes.append(Chunk(part.values.unsqueeze(0), whole_shape, (at // row, *part.offset)))
        at = stop
    return boxes


def write(path: Path, tensors: dict[str, Tensor], metadata: dict[str, str]) -> tuple[int, str]:
    """Write one safetensors file, flushed to the disk; give its size and sha256."""
    header: dict[str, Any] = {"__metadata__": metadata}
    end = 0
    for name, tensor in tensors.items():
        begin, end = end, end + tensor.numel() * tensor.element_size()
        header[name] = {"dtype": DTYPES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)  # the format wants tensors aligned
    digest = hashlib.sha256()
    try:
        with open(path, "wb") as file:
            for values in _parts(text, tensors):
                for begin in range(0, len(values), BLOCK):
                    block = values[begin : begin + BLOCK]
                    digest.update(block)
                    file.write(block)
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        raise describe_disk(error, path, 8 + len(text) + end) from error
    return 8 + len(text) + end, digest.hexdigest()


def _parts(header: bytes, tensors: dict[str, Tensor]) -> Iterator[Any]:
    yield len(header).to_bytes(8, "little")
    yield header
    for tensor in tensors.values():  # one at a time: a GPU shard never lies whole in host memory
        if tensor.numel():
            yield tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data


def describe_disk(error: OSError, path: Path, needed: int) -> OSError:
    """A full disk in words: which path, how much was needed, how much there is."""
    if error.errno not in (errno.ENOSPC, errno.EDQUOT):
        return error
    free = shutil.disk_usage(path.parent).free
    return OSError(
        error.errno,
        f"the disk is full: {needed:,} bytes needed, {free:,} free. Fix: make room, or a smaller checkpoint.keep",
        str(path),
    )


def sha256(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def fsync_folder(path: Path) -> None:
    """Make new and renamed entries of a folder survive a power loss."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


class Reader:
    """Reads tensors of a checkpoint folder, whole or in part, from however many shards they were saved in."""

    def __init__(self, folder: Path, tensors: dict[str, Any]) -> None:
        self.folder, self.tensors = folder, tensors
        self.files: dict[str, Any] = {}
        self.stack = ExitStack()

    def __enter__(self) -> Reader:
        return self

    def __exit__(self, *error: object) -> None:
        self.stack.close()

    def fill(self, name: str, chunk: Chunk) -> None:
        """Copy into a rank's chunk what overlaps it of every saved one."""
        for saved in self.tensors[name]["chunks"]:
            low = [max(a, b) for a, b in zip(saved["offset"], chunk.offset, strict=True)]
            high = [min(a + n, b + m) for a, n, b, m in
                    zip(saved["offset"], saved["shape"], chunk.offset, chunk.shape, strict=True)]  # fmt: skip
            if any(lo >= hi for lo, hi in zip(low, high, strict=True)):
                continue
            source = tuple(slice(lo - o, hi - o) for lo, hi, o in zip(low, high, saved["offset"], strict=True))
            target = tuple(slice(lo - o, hi - o) for lo, hi, o in zip(low, high, chunk.offset, strict=True))
            file = self._open(saved["file"])
            key = saved.get("key", name)
            values = file.get_slice(key)[source] if source else file.get_tensor(key)
            chunk.values[target].copy_(values)

    def whole(self, name: str) -> Tensor:
        spec = self.tensors[name]
        tensor = torch.empty(spec["shape"], dtype=getattr(torch, spec["dtype"]))
        for chunk in chunks_of(tensor):
            self.fill(name, chunk)
        return tensor

    def _open(self, file: str) -> Any:
        if file not in self.files:
            self.files[file] = self.stack.enter_context(safe_open(self.folder / file, framework="pt"))
        return self.files[file]
