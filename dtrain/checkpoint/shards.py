"""Tensors in safetensors files: written with a checksum and flushed to disk, and read back piece by piece.

The format is eight bytes of header length, a JSON header, and the tensors' bytes. Writing it here, tensor by tensor,
gives the checksum of exactly the bytes written, without a second copy of the shard in memory. A rank that has just
written a file still holds its tensors, and compares the file with them instead of hashing it again.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import math
import os
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from dtrain.checkpoint.layouts import Box, LayoutError, ints, overlap
from dtrain.checkpoint.manifest import Damaged, Manifest, Part, check_boxes, drop_cached_pages, rank_of, regular
from dtrain.formats.bounded import parse_json, short
from dtrain.formats.safetensors_header import Entry, HeaderError, read_header
from dtrain.util import disk_space
from dtrain.util.dtensor import Chunk, chunks_of
from dtrain.util.regular_file import NotRegular

DTYPES = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16", torch.int64: "I64",
    torch.int32: "I32", torch.int16: "I16", torch.int8: "I8", torch.uint8: "U8", torch.bool: "BOOL",
}  # fmt: skip
# Small enough that a block is still in cache after hashing when it is written; large enough that the writing thread
# takes the GIL, which training needs, only some hundred times a second.
BLOCK = 8 * 2**20


Names = tuple[str, str]  # of a tensor, and of one of its boxes in a rank's file


def write(path: Path, tensors: dict[str, Tensor], metadata: dict[str, str]) -> tuple[int, str]:
    """Write one safetensors file, flushed to disk; return its size and sha256."""
    text = header(tensors, metadata)
    size = len(text) + sum(tensor.nbytes for tensor in tensors.values())
    digest = hashlib.sha256()
    try:
        with open(path, "xb") as file:  # a new file: never one that another checkpoint shares
            digest.update(text)
            file.write(text)
            for block in itertools.chain.from_iterable(map(_blocks, tensors.values())):
                digest.update(block)
                file.write(block)
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        raise disk_space.describe(error, path, size) from error
    return size, digest.hexdigest()


def header(tensors: dict[str, Tensor], metadata: dict[str, str]) -> bytes:
    """Return what a safetensors file has before the tensors' bytes."""
    entries: dict[str, Any] = {"__metadata__": metadata}
    end = 0
    for name, tensor in tensors.items():
        begin, end = end, end + tensor.nbytes
        entries[name] = {"dtype": DTYPES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [begin, end]}
    text = json.dumps(entries).encode()
    text += b" " * (-len(text) % 8)  # the format requires aligned tensors
    return len(text).to_bytes(8, "little") + text


def _blocks(tensor: Tensor) -> Iterator[memoryview]:
    """Yield a tensor's bytes, at most BLOCK at a time, from host memory."""
    if tensor.numel():
        values = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data
        for begin in range(0, len(values), BLOCK):
            yield values[begin : begin + BLOCK]


def sha256(path: Path) -> str:
    """Return the hash of what is on disk: the file's cached pages are dropped first."""
    with regular(path) as file:
        drop_cached_pages(file)
        return hashlib.file_digest(file, "sha256").hexdigest()


def differing(path: Path, tensors: dict[str, Tensor], metadata: dict[str, str]) -> set[str]:
    """Return which tensors of a file differ from what `write` was given, on disk: cached pages are dropped first.

    A file with another header or size differs in all, and in "".
    """
    text, buffer = header(tensors, metadata), np.empty(BLOCK, np.uint8)
    found: set[str] = set()
    with regular(path) as file:
        drop_cached_pages(file)
        if file.read(len(text)) != text:
            return {"", *tensors}
        for name, tensor in tensors.items():
            for block in _blocks(tensor):
                read = buffer[: len(block)]
                if file.readinto(read.data) < len(block):
                    return {"", *tensors}
                if not np.array_equal(read, np.frombuffer(block, np.uint8)):
                    found.add(name)
        return {"", *tensors} if file.read(1) else found


def fsync_folder(path: Path) -> None:
    """Make a folder's new and renamed entries survive a power loss."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


class Reader:
    """Reads tensors of a checkpoint folder, whole or in part, from any number of shards.

    It only opens files of ranks that wrote requested parts. The checkpoint must have been verified.
    """

    def __init__(self, folder: Path, saved: Manifest) -> None:
        self.folder, self.saved = folder, saved
        self.files: dict[str, Any] = {}
        self.parts: dict[int, dict[str, list[Part]]] = {}  # by writing rank, then by tensor
        self.stack = ExitStack()

    def __enter__(self) -> Reader:
        return self

    def __exit__(self, *error: object) -> None:
        self.stack.close()

    def fill(self, name: str, chunk: Chunk) -> None:
        """Fill a rank's chunk from every saved part that overlaps it."""
        missing = chunk.values.numel()
        wanted = (chunk.offset, chunk.shape)
        for part in self._parts(name, chunk):
            common = overlap((part.offset, part.shape), wanted)
            if common is None:
                continue
            low, size = common
            source = tuple(slice(lo - o, lo - o + n) for lo, n, o in zip(low, size, part.offset, strict=True))
            target = tuple(slice(lo - o, lo - o + n) for lo, n, o in zip(low, size, chunk.offset, strict=True))
            file = self._open(part.file)
            values = file.get_slice(part.key)[source] if source else file.get_tensor(part.key)
            chunk.values[target].copy_(values)
            missing -= math.prod(size)
        if missing:
            raise Damaged(f"{self.folder} is incomplete: {missing} elements of {name} are missing")

    def whole(self, name: str) -> Tensor:
        spec = self.saved.tensors[name]
        tensor = torch.empty(spec.shape, dtype=getattr(torch, spec.dtype))
        for chunk in chunks_of(tensor):
            self.fill(name, chunk)
        return tensor

    def _parts(self, name: str, chunk: Chunk) -> Iterator[Part]:
        tensor = self.saved.tensors[name]
        if tensor.parts is not None:  # the first format lists all parts in its manifest
            yield from tensor.parts
            return
        for rank in tensor.layout.ranks_at(chunk.offset, chunk.shape):
            if rank not in self.parts:
                self.parts[rank] = {}
                for file in self.saved.files_of[rank]:
                    for held, part in parts_in(self.folder / file, self._open(file)):
                        self.parts[rank].setdefault(held, []).append(part)
            yield from self.parts[rank].get(name, ())

    def _open(self, file: str) -> Any:
        if file not in self.files:
            self.files[file] = self.stack.enter_context(safe_open(self.folder / file, framework="pt"))
        return self.files[file]


def metadata(chunks: Mapping[Names, Chunk]) -> dict[str, str]:
    """Return a shard's own description of its content: each tensor's keys, and where each box begins."""
    boxes: dict[str, list[Any]] = {}
    for (name, key), chunk in chunks.items():
        boxes.setdefault(name, []).append([key, chunk.offset])
    return {"format": "pt", "boxes": json.dumps(boxes)}


def parts_in(path: Path, shard: Any) -> Iterator[tuple[str, Part]]:
    """Yield the tensors and parts of an open shard, as its header lists them."""
    try:
        boxes = parse_json((shard.metadata() or {}).get("boxes", "").encode())
    except ValueError as error:
        raise Damaged(f"{path.name} does not say which boxes it holds: {error}") from error
    keys = set(shard.keys())
    for name, held in boxes.items() if isinstance(boxes, dict) else ():
        for box in held if isinstance(held, list) else [held]:
            if not (isinstance(box, list) and len(box) == 2 and isinstance(box[0], str) and box[0] in keys):
                raise Damaged(f"{path.name} lists {short(name)} as {short(box)}")
            keys.remove(box[0])
            offset, shape = ints(box[1]), tuple(shard.get_slice(box[0]).get_shape())
            if len(offset) != len(shape):
                raise Damaged(f"{path.name} lists {short(name)} at {short(box[1])}")
            yield name, Part(path.name, box[0], offset, shape)
    if keys:
        raise Damaged(f"{path.name} has {short(min(keys))} but does not list it")


def _parts_of(path: Path) -> list[tuple[str, Part]]:
    try:
        with safe_open(path, framework="pt") as shard:
            return list(parts_in(path, shard))
    except (SafetensorError, LayoutError) as error:
        raise Damaged(f"{path.name}: {error}") from error


def check_files(folder: Path, saved: Manifest, rank: int) -> None:
    """Check that the headers of a rank's files match the manifest. The tensors' bytes are not read."""
    boxes: dict[str, list[Box]] = {}
    found: dict[tuple[str, str], Entry] = {}
    for file in saved.files_of[rank]:
        try:
            header = read_header(folder / file)
        except HeaderError as error:
            missing = (NotRegular, FileNotFoundError, NotADirectoryError)
            if isinstance(error.__cause__, OSError) and not isinstance(error.__cause__, missing):
                raise error.__cause__ from None  # a disk that does not respond is not damage
            raise Damaged(str(error)) from error
        found |= {(file, key): entry for key, entry in header.items()}
        if not saved.is_old:
            for name, part in _parts_of(folder / file):
                boxes.setdefault(name, []).append((part.offset, part.shape))
                check_entry(saved, name, part, found)
    if saved.is_old:
        for name, tensor in saved.tensors.items():
            for part in tensor.parts or ():
                if rank_of(part.file) == rank:
                    check_entry(saved, name, part, found)
    else:
        check_boxes(saved, rank, boxes)


def check_entry(saved: Manifest, name: str, part: Part, found: dict[tuple[str, str], Entry]) -> None:
    entry, tensor = found.get((part.file, part.key)), saved.tensors.get(name)
    if entry is None or tensor is None:
        raise Damaged(f"{part.file} and the manifest do not agree on {short(name)}")
    same_kind = len(part.shape) == len(tensor.shape) and entry.dtype == DTYPES[getattr(torch, tensor.dtype)]
    if entry.shape != part.shape or not same_kind:
        raise Damaged(f"{part.file} has {short(part.key)} as {entry.dtype} {list(entry.shape)}, unlike the manifest")
