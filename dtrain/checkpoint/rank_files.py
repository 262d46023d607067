"""Which files a rank writes in a save, and how it writes them: in parallel, each hashed while it is written."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

from dtrain.checkpoint import shards
from dtrain.checkpoint.incremental import Links
from dtrain.checkpoint.shards import Names
from dtrain.checkpoint.writers import Writers
from dtrain.util.collective import rank
from dtrain.util.dtensor import Chunk, Held, chunks_of

# sha256 limits the speed of one file: 1.2 GiB/s per core, while a disk takes 2. So a rank writes several files, each
# hashed and written by its own thread; below this size more files do not pay off.
MAX_FILES, FILE_BYTES = 8, 256 * 2**20

Files = dict[str, dict[Names, Chunk]]  # what a rank writes, by file
T = TypeVar("T")


def share_out(tensors: Mapping[str, Held], writers: Writers, links: Links | None = None) -> Files:
    """Return the part of all ranks' state that this rank writes, by file."""
    # a rank may hold several boxes of one tensor: the first uses the tensor's name as its key
    chunks = {
        (name, name if i == 0 else f"{name}#{i}"): chunk
        for name, held in tensors.items() for i, chunk in enumerate(chunks_of(held))
        if chunk.nbytes or not chunk.shape  # uneven sharding leaves some ranks with nothing
    }  # fmt: skip
    assert len({key for _, key in chunks}) == len(chunks), (
        "a tensor name with # clashes with the key of another tensor's second box"
    )
    chosen = writers.choose(
        [
            (name, c.offset, c.shape, c.whole_shape, str(c.values.dtype).removeprefix("torch."))
            for (name, _), c in chunks.items()
        ]
    )
    mine = {names: c for names, c in chunks.items() if (names[0], c.offset, c.shape) in chosen}
    if links is None:
        return split(mine)
    # a file can be linked only if all of it is unchanged: what is expected to stay gets files of its own
    steady = links.steady(mine)
    files = split({names: c for names, c in mine.items() if names not in steady})
    return files | (split({names: mine[names] for names in mine if names in steady}, MAX_FILES) if steady else {})


def split(chunks: dict[Names, Chunk], first: int = 0) -> Files:
    """Distribute chunks over files of about the same size; number the files from `first`."""
    num_files = max(1, min(MAX_FILES, sum(c.nbytes for c in chunks.values()) // FILE_BYTES))
    stem = f"rank-{rank():05d}"
    numbers = range(first, first + num_files)
    files: Files = {f"{stem}-{i}.safetensors" if i else f"{stem}.safetensors": {} for i in numbers}
    load, file_of = dict.fromkeys(files, 0), {}
    for names in sorted(chunks, key=lambda names: -chunks[names].nbytes):  # largest first balances better
        file_of[names] = min(load, key=load.__getitem__)
        load[file_of[names]] += chunks[names].nbytes
    for names, chunk in chunks.items():
        files[file_of[names]][names] = chunk
    return files


def write_files(folder: Path, files: Files, links: Links | None = None) -> dict[str, Any]:
    """Write a rank's files in parallel, or link them; return each file's entry in the manifest."""
    if any(c.values.is_cuda for chunks in files.values() for c in chunks.values()):
        torch.cuda.synchronize()  # other threads copy from the GPU, each in its own stream
    if links:
        links.begin(files.values())

    def write(file: str) -> dict[str, Any]:
        spec = links.link(folder / file, files[file]) if links else None
        if spec is None:
            size, digest = shards.write(folder / file, *content(files[file]))
            spec = {"size": size, "sha256": digest}
        return spec

    return dict(zip(files, in_parallel(write, files), strict=True))


def content(chunks: dict[Names, Chunk]) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Return the tensors and the metadata of one file."""
    return {key: c.values for (_, key), c in chunks.items()}, shards.metadata(chunks)


def in_parallel(function: Callable[[str], T], files: Collection[str]) -> list[T]:
    """Call a function with each of a rank's files, in one thread per core of this rank's share."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    num_threads = min(MAX_FILES, len(files), cores // int(os.environ.get("LOCAL_WORLD_SIZE", 1)))
    if num_threads <= 1:
        return [function(file) for file in files]
    with ThreadPoolExecutor(num_threads) as pool:
        return list(pool.map(function, files))
