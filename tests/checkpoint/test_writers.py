"""Who writes what: every part exactly once, balanced, for any layout, also of a thousand ranks in one process."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dtrain.checkpoint import layouts, writers
from dtrain.checkpoint.background import Saver
from dtrain.checkpoint.writers import Entry, Part
from tests.world import spawn


def delivered(parcels: dict[int, dict[int, Any]]) -> dict[int, dict[int, Any]]:
    """What each rank receives of what each sends, through JSON as it travels."""
    received: dict[int, dict[int, Any]] = {}
    for sender, to in parcels.items():
        for receiver, parcel in to.items():
            received.setdefault(receiver, {})[sender] = json.loads(json.dumps(parcel))
    return received


def planned(held: dict[int, list[Entry]]) -> tuple[dict[int, set[Part]], dict[str, Any]]:
    """What every rank writes, and the index, by the same steps as `plan`."""
    size = len(held)
    received = delivered({r: writers.reports(entries, size) for r, entries in held.items()})
    answers = delivered({r: writers.judge(received.get(r, {})) for r in held})
    mine = {r: writers.divide(held[r], size, answers.get(r, {})) for r in held}
    confirmed = delivered({r: writers.by_referee(mine[r], size) for r in held})
    described = [writers.describe(received.get(r, {}), confirmed.get(r, {})) for r in held]
    return mine, writers.index([d[0] for d in described], [d[1] for d in described])


@st.composite
def worlds(draw: st.DrawFn) -> dict[int, list[Entry]]:
    """Ranks of a mesh of replicas × shards; each tensor is sharded on both axes, on one, or on none."""
    replicas, shards = draw(st.integers(1, 3)), draw(st.integers(1, 4))
    held: dict[int, list[Entry]] = {r: [] for r in range(replicas * shards)}
    for i in range(draw(st.integers(1, 6))):
        rows, columns = draw(st.integers(1, 9)), draw(st.integers(1, 3))
        kind = draw(st.sampled_from(["none", "shards", "both"]))
        for r, entries in held.items():
            n, place = {"none": (1, 0), "shards": (shards, r % shards), "both": (len(held), r)}[kind]
            step = -(-rows // n)
            low, high = min(rows, place * step), min(rows, (place + 1) * step)
            if high > low:
                entries.append((f"t{i}", (low, 0), (high - low, columns), (rows, columns), "float32"))
    return held


@given(worlds())
@settings(max_examples=150, deadline=None)
def test_each_part_is_written_once_by_one_that_holds_it(held: dict[int, list[Entry]]) -> None:
    mine, index = planned(held)
    for r, parts in mine.items():
        assert parts <= {entry[:3] for entry in held[r]}
    for name, tensor in index["tensors"].items():
        layout = layouts.parse(index["layouts"][tensor["layout"]], tuple(tensor["shape"]), len(held))
        for r, parts in mine.items():
            assert layout.is_written_by(r, [part[1:] for part in parts if part[0] == name])
    assert sum(len(parts) for parts in mine.values()) == len({entry[:3] for e in held.values() for entry in e})


def test_replicas_share_the_work() -> None:
    entries: list[Entry] = [(f"t{i}", (0, 0), (100, 10 + i), (100, 10 + i), "float32") for i in range(24)]
    mine, _ = planned({r: entries for r in range(4)})
    loads = [sum(shape[0] * shape[1] for _, _, shape in parts) for parts in mine.values()]
    assert max(loads) < 1.1 * min(loads)


def test_a_thousand_ranks_share_few_layouts() -> None:
    """Hybrid sharding, 8 replicas of 128 shards: what is written down does not grow with tensors × ranks."""
    sizes = {1024: 8, 512: 8}

    def held(r: int, num: int) -> list[Entry]:
        entries: list[Entry] = []
        for rows in sizes:
            part = rows // 128
            entries += [(f"{rows}.{i}", (r % 128 * part, 0), (part, 4), (rows, 4), "float32") for i in range(num)]
        return entries

    texts = []
    for num in (8, 16):
        _, index = planned({r: held(r, num) for r in range(1024)})
        assert len(index["tensors"]) == 2 * num and len(index["layouts"]) <= 16
        texts.append(len(json.dumps(index["layouts"])))
    assert texts[1] <= texts[0] * 1.1


def test_a_second_save_of_the_same_layout_plans_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plans, plan = [], writers.plan

    def counted(entries: list[Entry]) -> Any:
        plans.append(len(entries))
        return plan(entries)

    monkeypatch.setattr(writers, "plan", counted)
    with Saver(tmp_path, keep=9) as saver:
        for step, rows in ((1, 4), (2, 4), (3, 4), (4, 5)):
            saver.save(step, {"model.weight": torch.full((rows, 2), float(step))}, {"samples": step, "extra": {}})
            saver.wait()
    assert plans == [1, 1], "for the first save, and for the one of another shape"


def one_of_two_changes() -> None:
    """Rank 1 holds another tensor from the second save on; rank 0 what it held before."""
    rank, chosen = int(os.environ["RANK"]), writers.Writers()
    rows: list[Entry] = [("whole", (2 * rank, 0), (2, 3), (4, 3), "float32")]
    more: list[Entry] = [("more", (0,), (5,), (5,), "float32")] if rank == 1 else []
    assert chosen.choose(rows) == {entry[:3] for entry in rows}
    assert chosen.choose(rows + more) == {entry[:3] for entry in rows + more}
    assert sorted(chosen.index.get("tensors", {})) == (["more", "whole"] if rank == 0 else [])


def test_all_ranks_plan_again_if_one_holds_something_else() -> None:
    spawn(2, one_of_two_changes)
