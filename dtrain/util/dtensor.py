"""Which part of a tensor this rank holds: all of it, a DTensor's shard, or some boxes."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn


def is_dtensor(tensor: Tensor) -> bool:
    """Duck-typed, to avoid a 0.8 s import of torch.distributed.tensor; a process with a DTensor has imported it."""
    return hasattr(tensor, "placements")


def whole(tensor: Tensor) -> Tensor:
    """Return a DTensor's full values; any other tensor unchanged. All ranks that hold a part call it."""
    return tensor.full_tensor() if is_dtensor(tensor) else tensor  # type: ignore[attr-defined]


@dataclass(frozen=True, eq=False)
class Chunk:
    """A box of a named tensor that this rank holds: its live values, and its offset in the whole."""

    values: Tensor
    whole_shape: tuple[int, ...]
    offset: tuple[int, ...]

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.values.shape)

    @property
    def box(self) -> tuple[slice, ...]:
        """The slice of the whole: `whole[chunk.box]` has the shape of the values."""
        return tuple(slice(o, o + n) for o, n in zip(self.offset, self.shape, strict=True))

    @property
    def nbytes(self) -> int:
        return self.values.numel() * self.values.element_size()


Held = Tensor | list[Chunk]  # what a rank holds of a named tensor: all of it, a DTensor's shard, or some boxes


def chunks_of(held: Held) -> list[Chunk]:
    if isinstance(held, list):
        return held
    if is_dtensor(held):
        dtensor: Any = held
        mesh = dtensor.device_mesh
        offset = offset_of(tuple(held.shape), mesh, tuple(dtensor.placements), tuple(mesh.get_coordinate() or ()))
        return [Chunk(dtensor.to_local(), tuple(held.shape), offset)]
    return [Chunk(held, tuple(held.shape), (0,) * held.dim())]


@functools.lru_cache(maxsize=4096)
def offset_of(
    shape: tuple[int, ...], mesh: Any, placements: tuple[Any, ...], place: tuple[int, ...]
) -> tuple[int, ...]:
    """Offset of this rank's shard of a DTensor. Cached: hundreds of weights have the same shape and placement.

    `place`: this rank's mesh coordinate. Meshes of two worlds compare equal, but this process may have another rank.
    """
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    return tuple(compute_local_shape_and_global_offset(shape, mesh, placements)[1])


def flat_chunks(values: Tensor, whole_shape: tuple[int, ...], begin: int) -> list[Chunk]:
    """Split a range of the flattened tensor into boxes, as views of `values`.

    DeepSpeed shards a weight without regard to its rows. In a matrix such a range is at most three boxes: the rest of a
    row, whole rows, the start of a row; each further dimension adds two.
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


def local(tensor: Tensor) -> Tensor:
    """Return this rank's part of a DTensor; any other tensor unchanged."""
    if type(tensor) in (Tensor, nn.Parameter):  # a failing hasattr takes 0.5 µs, times thousands
        return tensor
    return tensor.to_local() if is_dtensor(tensor) else tensor  # type: ignore[attr-defined]
