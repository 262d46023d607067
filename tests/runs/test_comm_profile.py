"""The communication profile from the files of several ranks: waiting, own time, rates; and damaged files."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dtrain.runs import comm_profile

MB = 10**6


def write(run: Path, rank: int, begin: list[float], end: list[float], host: str = "a", group: Any = (0, 1)) -> None:
    """All-reduces of 1 MB, one in each of two steps; times in µs."""
    calls = [["all_reduce", MB, 0, b, e] for b, e in zip(begin, end, strict=True)]
    content = {"rank": rank, "host": host, "groups": [group], "calls": calls, "num_steps": 2}
    (run / "profiles").mkdir(exist_ok=True)
    (run / "profiles" / f"communication-rank-{rank}.json").write_text(json.dumps(content))


@pytest.mark.parametrize("host, clock", [("a", 0.0), ("b", 77_000.0)])
def test_who_waits_and_how_fast_the_link_is(tmp_path: Path, host: str, clock: float) -> None:
    write(tmp_path, 0, [0, 100_000], [30_000, 110_000])
    late = [20_000 + clock, 99_000 + clock], [30_000 + clock, 110_000 + clock]
    write(tmp_path, 1, *late, host=host)
    lines = {"all_reduce": {"ranks": 2, "latency_us": 2000.0, "bus_gb_s": 0.125}}
    (tmp_path / "plan.json").write_text(json.dumps({"collectives": lines}))
    found = comm_profile.profile(tmp_path)
    assert found is not None and found["problem"] == ""
    assert found["waits"] == [
        {"rank": 0, "for": 1, "ms_per_step": 10.0, "calls": 1, "of": 2},
        {"rank": 1, "for": 0, "ms_per_step": 0.5, "calls": 1, "of": 2},
    ]
    (message,) = found["messages"]
    assert message == {
        "kind": "all_reduce", "bytes": MB, "ranks": 2, "per_step": 1.0, "ms_per_step": (30 + 10 + 10 + 11) / 4,
        "own_ms": 10.0, "bus_gb_s": 0.1, "expected_gb_s": 0.1,
    }  # fmt: skip
    assert comm_profile.cells(message) == ["all_reduce", "977 KiB", "2", "1", "15.25", "10.00", "0.1", "0.1"]


def test_one_rank_alone_shows_its_messages(tmp_path: Path) -> None:
    write(tmp_path, 0, [0, 100_000], [30_000, 110_000])
    found = comm_profile.profile(tmp_path)
    assert found is not None and found["waits"] == [] and "profile.ranks=null" in found["problem"]
    assert found["messages"][0]["own_ms"] == 10.0 and found["messages"][0]["expected_gb_s"] is None


def test_unknown_groups_are_not_compared(tmp_path: Path) -> None:
    for rank in (0, 1):
        write(tmp_path, rank, [0], [10], group=())
    found = comm_profile.profile(tmp_path)
    assert found is not None and found["waits"] == [] and "cannot be compared" in found["problem"]


def test_no_profile(tmp_path: Path) -> None:
    assert comm_profile.profile(tmp_path) is None


LEAF = st.none() | st.booleans() | st.integers() | st.just(10**400) | st.floats() | st.text(max_size=6)
JSON = st.recursive(LEAF, lambda c: st.lists(c, max_size=5) | st.dictionaries(st.text(max_size=4), c, max_size=3))


@settings(max_examples=50)
@given(st.lists(st.lists(JSON, min_size=5, max_size=5) | JSON, max_size=4) | JSON, JSON, JSON)
def test_values_of_any_type_are_no_error(calls: Any, groups: Any, steps: Any) -> None:
    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder)
        for rank in (0, 1):
            write(run, rank, [0], [10])
        content = {"rank": 1, "groups": groups, "calls": calls, "num_steps": steps}
        (run / "profiles" / "communication-rank-1.json").write_text(json.dumps(content))
        found = comm_profile.profile(run)
        assert found is not None
        for message in found["messages"]:
            comm_profile.cells(message)
