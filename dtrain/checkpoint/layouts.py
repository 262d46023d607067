"""How a saved tensor is divided among the ranks that wrote it, in O(ranks) space, not O(tensors × ranks).

A layout always covers its tensor exactly once: `of` and `parse` refuse everything else. It is one of:

- a grid: `cuts` along each dimension, and the rank of each cell in row-major order (replicated and DTensor shards);
- runs of the flattened tensor: one row of cuts, and the rank of each run (DeepSpeed's partitions);
- a list of boxes (all else).

Tensors of the same shape usually share one layout, so a manifest stores each layout once. No torch import here.
"""

from __future__ import annotations

import functools
import itertools
import math
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

Ints = tuple[int, ...]
Box = tuple[Ints, Ints]  # offset and shape
Piece = tuple[int, Ints, Ints]  # rank, offset, shape
MAX_DIMS = 16
MAX_BOXES = 1024  # most boxes in a list: every pair is compared


class LayoutError(ValueError):
    """Pieces that do not cover a tensor exactly once, or a malformed description."""


@dataclass(frozen=True)
class Layout:
    """Who wrote which part of a tensor of this shape. `kind`: grid, runs or boxes."""

    kind: str
    shape: Ints
    cuts: tuple[Ints, ...]  # grid: one row per dimension; runs: one row
    ranks: Ints  # of each cell, run or box
    boxes: tuple[Box, ...] = ()

    def as_json(self) -> dict[str, Any]:
        """Return the description without the shape, so that tensors can share it."""
        if self.kind == "boxes":
            return {"ranks": list(self.ranks), "boxes": [[list(o), list(s)] for o, s in self.boxes]}
        return {"ranks": list(self.ranks), self.kind: [list(row) for row in self.cuts]}

    def ranks_at(self, offset: Ints, shape: Ints) -> list[int]:
        """Return the ranks that wrote some of this box; for runs, possibly a few more."""
        if 0 in shape:
            return []
        if self.kind == "grid":
            spans = [
                range(bisect_right(row, o) - 1, bisect_left(row, o + n))
                for row, o, n in zip(self.cuts, offset, shape, strict=True)
            ]
            cells: Iterable[int] = (self._cell(where) for where in itertools.product(*spans))
        elif self.kind == "runs":
            row, low = self.cuts[0], flat_index(offset, self.shape)
            high = flat_index(tuple(o + n - 1 for o, n in zip(offset, shape, strict=True)), self.shape)
            cells = range(bisect_right(row, low) - 1, bisect_right(row, high))
        else:
            cells = (i for i, box in enumerate(self.boxes) if overlap(box, (offset, shape)))
        return list(dict.fromkeys(self.ranks[cell] for cell in cells))

    def is_written_by(self, rank: int, boxes: Iterable[Box]) -> bool:
        """Return whether these boxes are exactly this rank's part."""
        if self.kind == "runs":
            return runs_of(self.shape, boxes) == [(self.cuts[0][i], self.cuts[0][i + 1]) for i in self._cells(rank)]
        given = sorted(boxes)
        return given == sorted(self._box(cell) for cell in self._cells(rank))

    def _cell(self, where: Iterable[int]) -> int:
        index = 0
        for i, row in zip(where, self.cuts, strict=True):
            index = index * (len(row) - 1) + i
        return index

    def _box(self, cell: int) -> Box:
        if self.kind == "boxes":
            return self.boxes[cell]
        low, size = [], []
        for row in reversed(self.cuts):
            cell, i = divmod(cell, len(row) - 1)
            low.append(row[i])
            size.append(row[i + 1] - row[i])
        return tuple(reversed(low)), tuple(reversed(size))

    def _cells(self, rank: int) -> list[int]:
        return self._by_rank.get(rank, [])

    @functools.cached_property
    def _by_rank(self) -> dict[int, list[int]]:
        found: dict[int, list[int]] = {}
        for cell, rank in enumerate(self.ranks):
            found.setdefault(rank, []).append(cell)
        return found


def of(shape: Ints, pieces: Sequence[Piece]) -> Layout:
    """Return the most compact layout for these pieces."""
    if any(not len(offset) == len(size) == len(shape) for _, offset, size in pieces):
        raise LayoutError("a shard has a different number of dimensions than its tensor")
    return _grid(shape, pieces) or _runs(shape, pieces) or _boxes(shape, pieces)


def parse(content: Any, shape: Ints, num_ranks: int) -> Layout:
    """Parse the output of `as_json` for a tensor of this shape; refuse anything else."""
    if not isinstance(content, dict) or len(content) != 2 or "ranks" not in content:
        raise LayoutError("a layout is not an object with ranks and cuts")
    ranks = ints(content["ranks"], num_ranks - 1)
    kind = next(key for key in content if key != "ranks")
    if kind == "boxes":
        given = content["boxes"]
        if not isinstance(given, list) or len(given) != len(ranks):
            raise LayoutError("a layout has a different number of boxes than ranks")
        pieces = []
        for rank, box in zip(ranks, given, strict=True):
            if not isinstance(box, list) or len(box) != 2:
                raise LayoutError("a box of a layout is not an offset and a shape")
            pieces.append((rank, ints(box[0]), ints(box[1])))
        return _boxes(shape, pieces)
    if kind not in ("grid", "runs") or not isinstance(content[kind], list):
        raise LayoutError(f"a layout has the unknown kind {kind!r:.40}")
    cuts = tuple(ints(row) for row in content[kind])
    ends = list(shape) if kind == "grid" else [math.prod(shape)]
    if len(cuts) != len(ends):
        raise LayoutError("a layout has a different number of dimensions than its tensor")
    for row, end in zip(cuts, ends, strict=True):
        if len(row) < 2 or row[0] != 0 or row[-1] != end or any(a >= b for a, b in itertools.pairwise(row)):
            raise LayoutError("the cuts of a layout do not run from 0 to the end of its tensor")
    if math.prod(len(row) - 1 for row in cuts) != len(ranks):
        raise LayoutError("a layout has a different number of cells than ranks")
    return Layout(kind, shape, cuts, ranks)


def _grid(shape: Ints, pieces: Sequence[Piece]) -> Layout | None:
    """Return a grid layout if the pieces are its cells, each given once; otherwise None."""
    cuts = []
    for d, end in enumerate(shape):
        row = sorted({0, end, *(o[d] for _, o, _ in pieces), *(o[d] + s[d] for _, o, s in pieces)})
        if row[0] < 0 or row[-1] > end:
            raise LayoutError("a shard lies outside its tensor")
        cuts.append(tuple(row))
    if math.prod(len(row) - 1 for row in cuts) != len(pieces):
        return None
    places = [{low: i for i, low in enumerate(row)} for row in cuts]
    layout = Layout("grid", shape, tuple(cuts), tuple(0 for _ in pieces))
    ranks: dict[int, int] = {}
    for rank, offset, size in pieces:
        where = [place[o] for place, o in zip(places, offset, strict=True)]
        ends = (row[i + 1] if i + 1 < len(row) else -1 for row, i in zip(cuts, where, strict=True))
        if any(o + n != end for o, n, end in zip(offset, size, ends, strict=True)):
            return None
        ranks[layout._cell(where)] = rank
    if len(ranks) != len(pieces):
        return None
    return Layout("grid", shape, tuple(cuts), tuple(ranks[cell] for cell in range(len(ranks))))


def _runs(shape: Ints, pieces: Sequence[Piece]) -> Layout | None:
    """Return a runs layout if the pieces are contiguous in the flattened tensor and leave no holes; otherwise None."""
    runs = []
    for rank, offset, size in pieces:
        run = flat_run(shape, offset, size)
        if run is None:
            return None
        runs.append((*run, rank))
    cuts, end = [0], 0
    ranks: list[int] = []
    for low, high, rank in sorted(runs):
        if low != end or high == low:
            return None
        if ranks and ranks[-1] == rank:
            cuts[-1] = high
        else:
            cuts.append(high)
            ranks.append(rank)
        end = high
    return Layout("runs", shape, (tuple(cuts),), tuple(ranks)) if end == math.prod(shape) and ranks else None


def _boxes(shape: Ints, pieces: Sequence[Piece]) -> Layout:
    if len(pieces) > MAX_BOXES:
        raise LayoutError(f"a tensor has {len(pieces)} irregular shards, and at most {MAX_BOXES} are supported")
    for _, offset, size in pieces:
        if len(offset) != len(shape) or len(size) != len(shape):
            raise LayoutError("a shard has a different number of dimensions than its tensor")
        if any(o < 0 or n < 1 or o + n > end for o, n, end in zip(offset, size, shape, strict=True)):
            raise LayoutError("a shard lies outside its tensor")
    boxes = tuple((offset, size) for _, offset, size in pieces)
    covered = sum(math.prod(size) for _, size in boxes)
    if covered != math.prod(shape):
        raise LayoutError(f"{covered} of {math.prod(shape)} elements of a tensor are saved")
    if len(boxes) > 1 and shape:
        low = np.array([offset for offset, _ in boxes], dtype=np.int64)
        high = low + np.array([size for _, size in boxes], dtype=np.int64)
        common = (np.maximum(low[:, None], low) < np.minimum(high[:, None], high)).all(axis=2)
        if common.sum() > len(boxes):  # more than each box with itself
            raise LayoutError("two shards of a tensor overlap")
    return Layout("boxes", shape, (), tuple(rank for rank, _, _ in pieces), boxes)


def flat_index(offset: Ints, shape: Ints) -> int:
    index = 0
    for o, n in zip(offset, shape, strict=True):
        index = index * n + o
    return index


def flat_run(whole: Ints, offset: Ints, shape: Ints) -> tuple[int, int] | None:
    """Return where a box begins and ends in the flattened tensor, or None if it is not contiguous there."""
    if not len(whole) == len(offset) == len(shape):
        return None
    first = next((d for d, n in enumerate(shape) if n != 1), len(shape))
    if shape[first + 1 :] != whole[first + 1 :]:
        return None
    begin = flat_index(offset, whole)
    return begin, begin + math.prod(shape)


def runs_of(whole: Ints, boxes: Iterable[Box]) -> list[tuple[int, int]]:
    """Return the runs of the flattened tensor that these boxes form; a non-contiguous box matches no run."""
    merged: list[tuple[int, int]] = []
    for low, high in sorted(flat_run(whole, *box) or (-1, -1) for box in boxes):
        if merged and merged[-1][1] == low:
            merged[-1] = (merged[-1][0], high)
        else:
            merged.append((low, high))
    return merged


def overlap(one: Box, other: Box) -> Box | None:
    """Return the intersection of two boxes, or None."""
    low = tuple(map(max, one[0], other[0]))
    high = tuple(min(a + n, b + m) for a, n, b, m in zip(*one, *other, strict=True))
    size = tuple(h - lo for lo, h in zip(low, high, strict=True))
    return (low, size) if all(n > 0 for n in size) else None


def ints(values: Any, most: int = 2**62) -> Ints:
    """Check that a JSON list holds integers from 0 to `most`; return them."""
    if not isinstance(values, list) or not all(type(v) is int and 0 <= v <= most for v in values):
        raise LayoutError("expected a list of whole numbers")
    return tuple(values)
