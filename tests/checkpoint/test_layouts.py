"""Layouts: any way to divide a tensor comes back as it was, and what does not cover it exactly once is refused."""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dtrain.checkpoint import layouts
from dtrain.checkpoint.layouts import Box, LayoutError, Piece

SHAPES = st.lists(st.integers(1, 6), max_size=3).map(tuple)


@st.composite
def divided(draw: st.DrawFn) -> tuple[tuple[int, ...], list[Piece]]:
    """A tensor in pieces: a grid, runs, or boxes that were split again and again."""
    shape = draw(SHAPES)
    rank = st.integers(0, 7)
    kind = draw(st.sampled_from(["grid", "runs", "boxes"]))
    if kind == "grid":
        rows = [sorted({0, n, *draw(st.lists(st.integers(0, n), max_size=3))}) for n in shape]
        cells = itertools.product(*(list(itertools.pairwise(row)) for row in rows))
        return shape, [(draw(rank), tuple(a for a, _ in c), tuple(b - a for a, b in c)) for c in cells]
    if kind == "runs":
        total = math.prod(shape)
        cuts = sorted({0, total, *draw(st.lists(st.integers(0, total), max_size=3))})
        owners = [draw(rank) for _ in cuts]
        return shape, [
            (owner, *box)
            for owner, (a, b) in zip(owners, itertools.pairwise(cuts), strict=False)
            for box in boxes_of_run(shape, a, b)
        ]
    boxes: list[Box] = [((0,) * len(shape), shape)]
    for _ in range(draw(st.integers(0, 4))):
        i = draw(st.integers(0, len(boxes) - 1))
        offset, size = boxes[i]
        wide = [d for d, n in enumerate(size) if n > 1]
        if wide:
            d = draw(st.sampled_from(wide))
            at = draw(st.integers(1, size[d] - 1))
            first = (offset, (*size[:d], at, *size[d + 1 :]))
            second = ((*offset[:d], offset[d] + at, *offset[d + 1 :]), (*size[:d], size[d] - at, *size[d + 1 :]))
            boxes[i : i + 1] = [first, second]
    return shape, [(draw(rank), *box) for box in boxes]


def boxes_of_run(shape: tuple[int, ...], begin: int, end: int) -> Iterator[Box]:
    for i in range(begin, end):
        index = []
        for n in reversed(shape):
            i, at = divmod(i, n)
            index.append(at)
        yield tuple(reversed(index)), (1,) * len(shape)


def elements(box: Box) -> set[tuple[int, ...]]:
    return set(itertools.product(*(range(o, o + n) for o, n in zip(*box, strict=True))))


@given(divided(), st.data())
@settings(max_examples=150, deadline=None)
def test_a_layout_comes_back_and_finds_every_rank(
    tensor: tuple[tuple[int, ...], list[Piece]], data: st.DataObject
) -> None:
    shape, pieces = tensor
    layout = layouts.of(shape, pieces)
    assert layouts.parse(json.loads(json.dumps(layout.as_json())), shape, 8) == layout
    for rank in range(8):
        own = [(o, s) for r, o, s in pieces if r == rank]
        assert layout.is_written_by(rank, own)
        assert not own or not layout.is_written_by(rank, own[1:])
    box = [sorted(data.draw(st.tuples(st.integers(0, n), st.integers(0, n)))) for n in shape]
    offset, size = tuple(lo for lo, _ in box), tuple(hi - lo for lo, hi in box)
    needed = {r for r, o, s in pieces if elements((o, s)) & elements((offset, size))}
    found = layout.ranks_at(offset, size)
    assert needed <= set(found) and len(found) == len(set(found))
    assert layout.kind == "runs" or needed == set(found)


@given(divided(), st.data())
@settings(max_examples=150, deadline=None)
def test_a_hole_or_an_overlap_is_refused(tensor: tuple[tuple[int, ...], list[Piece]], data: st.DataObject) -> None:
    shape, pieces = tensor
    i = data.draw(st.integers(0, len(pieces) - 1))
    with pytest.raises(LayoutError):
        layouts.of(shape, pieces[:i] + pieces[i + 1 :])
    with pytest.raises(LayoutError):
        layouts.of(shape, [*pieces, pieces[i]])


KEYS = st.sampled_from(["ranks", "grid", "runs", "boxes"])
JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-3, 9) | st.floats(allow_nan=False) | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(KEYS, inner),
    max_leaves=12,
)


@given(JSON, SHAPES)
@settings(max_examples=150, deadline=None)
def test_a_description_of_something_else_is_refused_or_covers_all(content: object, shape: tuple[int, ...]) -> None:
    try:
        layout = layouts.parse(content, shape, 8)
    except LayoutError:
        return
    boxes = layout.boxes or tuple(layout._box(i) for i in range(len(layout.ranks)))
    if layout.kind != "runs":
        assert sum(len(elements(box)) for box in boxes) == math.prod(shape)


def test_a_layout_of_a_thousand_ranks_is_stored_once_and_is_small() -> None:
    pieces = [(rank, (8 * rank, 0), (8, 4)) for rank in range(1024)]
    text = json.dumps(layouts.of((8192, 4), pieces).as_json())
    assert len(text) < 15_000
    assert layouts.of((8192, 4), pieces).ranks_at((8 * 500 - 1, 0), (2, 4)) == [499, 500]


def test_an_overlap_does_not_make_up_for_a_hole() -> None:
    """As many elements as the tensor has: one of them twice, and another not at all."""
    with pytest.raises(LayoutError, match="overlap"):
        layouts.of((4,), [(0, (0,), (2,)), (1, (1,), (2,))])


@pytest.mark.parametrize("kind", ["grid", "runs"])
@pytest.mark.parametrize("row", [[0, 3], [1, 4], [0, 5], [0, 2, 2, 4], [0, 3, 2, 4], [4]], ids=str)
def test_cuts_lead_from_0_to_the_end(kind: str, row: list[int]) -> None:
    with pytest.raises(LayoutError, match="do not run from 0 to the end"):
        layouts.parse({"ranks": [0] * (len(row) - 1), kind: [row]}, (4,), 8)
