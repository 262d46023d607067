"""AdamW's moments in a checkpoint: saved as they are held, in fp32, bf16 or int8, and converted when they are loaded.

Moments in int8 are two tensors: the codes, and the scales of their blocks (kernels/int8_blocks.py). Both are sharded
like the weight, so a load into int8 moves them as any other tensor.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

import torch
from torch import Tensor

from dtrain.checkpoint.shards import Reader
from dtrain.kernels import BLOCK, SCALES, int8_blocks
from dtrain.util.dtensor import Chunk


def scales_of(name: str) -> str:
    """Return the name of the scales that a tensor has in int8; "" if it is no moment."""
    weight, _, key = name.rpartition(".")
    return f"{weight}.{SCALES[key]}" if name.startswith("optim.") and key in SCALES else ""


def only_scales(name: str, others: Collection[str]) -> bool:
    """Are these the scales of moments that the other side holds in another dtype?"""
    weight, _, key = name.rpartition(".")
    moment = next((k for k, scale in SCALES.items() if scale == key), None)
    return moment is not None and name not in others and f"{weight}.{moment}" in others


def fill(reader: Reader, name: str, chunk: Chunk, chunks: Mapping[str, list[Chunk]]) -> None:
    """Fill a chunk of a tensor, and its scales if it has some and the checkpoint has none."""
    scales = scales_of(name)
    if scales in chunks and scales not in reader.saved.tensors:
        exact = Chunk(torch.empty(chunk.shape), chunk.whole_shape, chunk.offset)
        reader.fill(name, exact)
        encode = int8_blocks.first_codes if chunk.values.dtype == torch.int8 else int8_blocks.second_codes
        codes, new = encode(exact.values.view(-1))
        held = next(c for c in chunks[scales] if c.offset == scales_box(chunk)[0])
        chunk.values.copy_(codes.view(chunk.shape))
        held.values.copy_(new.view(held.shape))
    elif scales in reader.saved.tensors and scales not in chunks:
        chunk.values.copy_(decoded(reader, name, chunk))
    else:
        reader.fill(name, chunk)


def decoded(reader: Reader, name: str, chunk: Chunk) -> Tensor:
    """Return the fp32 values of a part of moments that are saved in int8. It may begin and end within a block."""
    dtype = getattr(torch, reader.saved.tensors[name].dtype)
    offset, shape = scales_box(chunk)
    scales = Chunk(torch.empty(shape), tuple(reader.saved.tensors[scales_of(name)].shape), offset)
    reader.fill(scales_of(name), scales)
    codes = torch.zeros(shape[0], shape[1] * BLOCK, dtype=dtype)
    begin = chunk.offset[1] - offset[1] * BLOCK
    part = codes[:, begin : begin + chunk.shape[1]]
    reader.fill(name, Chunk(part, chunk.whole_shape, chunk.offset))
    return int8_blocks.values(codes, scales.values).view(codes.shape)[:, begin : begin + chunk.shape[1]]


def scales_box(chunk: Chunk) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return offset and shape of the blocks in which a part of a matrix lies."""
    (row, column), (rows, columns) = chunk.offset, chunk.shape
    first = column // BLOCK
    return (row, first), (rows, -(-(column + columns) // BLOCK) - first)


def whole(reader: Reader, name: str) -> Tensor:
    """Return a whole tensor, moments in fp32 if they are saved in int8."""
    if scales_of(name) not in reader.saved.tensors:
        return reader.whole(name)
    shape = reader.saved.tensors[name].shape
    return decoded(reader, name, Chunk(torch.empty(shape, device="meta"), shape, (0, 0)))
