"""vTrain's figures are put together from a simulator's parts; without those that cannot be, the choice is good."""

from __future__ import annotations

import sys
from collections import defaultdict
from itertools import pairwise
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks" / "planner"))

import choose
import computed
import rows
import score


@pytest.fixture(scope="module")
def published() -> list[rows.Row]:
    return rows.read(computed.SOURCE)


def test_large_gradients_take_what_the_simulator_says_to_the_nanosecond(published: list[rows.Row]) -> None:
    alike: dict[tuple[computed.Kind, int, int], list[rows.Row]] = defaultdict(list)
    for row in published:
        if computed.is_large(row):
            alike[computed.kind(row), computed.layers(row), row.layout.micro_batches].append(row)
    pairs = [pair for group in alike.values() for pair in pairwise(sorted(group, key=lambda row: row.layout.dp))]
    assert len(pairs) > 20
    for few, many in pairs:
        said = computed.reduce_seconds(many) - computed.reduce_seconds(few)
        assert many.step_s - few.step_s == pytest.approx(said, abs=2e-9)
        assert many.step_s < few.step_s  # over more ranks: no all-reduce is like that


def test_a_pass_more_through_a_pipeline_takes_the_seconds_of_blocks_without_one(published: list[rows.Row]) -> None:
    blocks = computed.block_seconds(published)
    steps: dict[tuple[computed.Kind, int, int, int], dict[int, float]] = defaultdict(dict)
    for row in published:
        if row.layout.pp > 1:
            steps[computed.kind(row), row.layout.pp, computed.layers(row), row.layout.dp][row.layout.micro_batches] = (
                row.step_s
            )
    passes: dict[tuple[computed.Kind, int], dict[int, float]] = defaultdict(dict)
    for (kind, pp, layers, _), found in steps.items():
        few, many = min(found), max(found)
        if few < many:
            passes[kind, pp][layers] = (found[many] - found[few]) / (many - few)
    pairs = [(key, *pair) for key, by in passes.items() for pair in pairwise(sorted(by.items()))]
    assert len(pairs) > 30
    for (kind, pp), (shallow, less), (deep, more) in pairs:
        assert (more - less) * pp / (deep - shallow) == pytest.approx(blocks[kind], rel=0.005)


def test_more_samples_take_less_time_in_some_of_them(published: list[rows.Row]) -> None:
    blocks = computed.block_seconds(published)
    least = computed.never_less(blocks)
    shrink = {kind for kind in blocks if least[kind] > blocks[kind]}
    assert (1024, 2, 4) in shrink and len(shrink) == 8
    assert blocks[1024, 2, 4] == pytest.approx(3.175e-3, rel=1e-3)
    assert blocks[1024, 2, 2] == pytest.approx(3.582e-3, rel=1e-3)


def test_the_choice_keeps_its_limits_without_what_cannot_be(published: list[rows.Row]) -> None:
    mended = computed.mended(published)
    assert all(after.step_s >= before.step_s for before, after in zip(published, mended, strict=True))
    slower = [one.slowdown for one in choose.choices(score.score_all(mended)[0], choose.any_batch)]
    assert len(slower) == 24
    assert max(slower) <= choose.WORST_LIMIT and sum(slower) / len(slower) <= choose.MEAN_LIMIT
