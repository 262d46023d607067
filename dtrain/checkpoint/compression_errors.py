"""Load what compression has not sent yet (dtrain/comm), for another number of ranks too, or from a checkpoint without.

`comm.NAME.error` has a leading dimension for the ranks. On another number of ranks, n instead of m, the saved rows are
dealt out and multiplied by n / m. So the mean over the ranks, which is what training still owes the weights, stays the
same, and each row is read once.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from dtrain.checkpoint.manifest import Manifest
from dtrain.checkpoint.shards import Reader
from dtrain.util.dtensor import Chunk

PREFIX, BY_RANK = "comm.", ".error"


def fill(reader: Reader, saved: Manifest, wanted: Mapping[str, list[Chunk]]) -> None:
    """Fill these chunks in place; zeros for what is not in the checkpoint, or has another shape there."""
    for name, chunks in wanted.items():
        shape = tuple(saved.tensors[name].shape) if name in saved.tensors else ()
        for chunk in chunks:
            if shape == chunk.whole_shape:
                reader.fill(name, chunk)
            elif name.endswith(BY_RANK) and shape[1:] == chunk.whole_shape[1:] and shape:
                fill_dealt(reader, name, chunk, shape)
            else:
                chunk.values.zero_()


def fill_dealt(reader: Reader, name: str, chunk: Chunk, shape: tuple[int, ...]) -> None:
    row = torch.empty(chunk.shape, dtype=chunk.values.dtype)
    total = torch.zeros_like(row)
    num_ranks, mine = chunk.whole_shape[0], chunk.offset[0]
    for rank in range(mine, shape[0], num_ranks):
        reader.fill(name, Chunk(row, shape, (rank, *chunk.offset[1:])))
        total += row
    chunk.values.copy_(total * (num_ranks / shape[0]))
