"""Who takes part in an elastic run after ranks left, were lost or shall join."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from dtrain.launch.members import Members, request
from dtrain.runs.protocol import ELASTIC, note_leave


def members(usable: list[int], **cluster: Any) -> Members:
    return Members({"cluster": {"processes": "1:4", "nodes": 1} | cluster}, usable)


@pytest.fixture
def run_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "logs").mkdir()
    monkeypatch.setenv(ELASTIC, "1")
    return tmp_path


def test_a_number_that_cannot_be_used_is_rounded_down() -> None:
    ranks = members([1, 2, 4])
    assert [ranks.fit(n) for n in (0, 1, 2, 3, 4, 9)] == [0, 1, 2, 2, 4, 4]
    ranks.check(4)
    with pytest.raises(ValueError, match=r"the numbers that can be used are 1, 2, 4\n  fix: dtrain scale RUN 2"):
        ranks.check(3)


def test_ranks_that_leave_and_are_lost_in_the_same_step(run_dir: Path) -> None:
    ranks = members([1, 2, 3, 4])
    assert ranks.change(run_dir, 4, {}) is None, "nothing happened"
    note_leave(run_dir, 2)
    change = ranks.change(run_dir, 4, {})
    assert change and (change.size, change.gone, change.why) == (3, {2}, "rank 2 left")
    note_leave(run_dir, 3)
    change = ranks.change(run_dir, 4, {0: "rank 0: SIGKILL"})
    assert change and (change.size, change.why) == (1, "ranks 2 and 3 left, rank 0: SIGKILL")
    assert members([2, 3, 4]).change(run_dir, 4, {0: "killed"}) is None, "too few are left"
    ranks.forget(run_dir)
    assert ranks.left(run_dir) == set()


def test_a_number_that_was_rounded_down_is_explained(run_dir: Path) -> None:
    note_leave(run_dir, 1)
    change = members([1, 2, 4]).change(run_dir, 4, {})
    assert change and (change.size, change.why) == (2, "rank 1 left, 3 cannot be used")


def test_a_request_is_for_a_number(run_dir: Path) -> None:
    request(run_dir, 4)
    change = members([1, 2, 4]).change(run_dir, 1, {})
    assert change and (change.size, change.why) == (4, "4 ranks requested")
    (run_dir / "scale.json").write_text("{")
    assert members([1, 2]).requested(run_dir) is None


def test_a_node_leaves_with_all_its_ranks(run_dir: Path) -> None:
    nodes = members([1, 2, 3], nodes="1:3", processes=8)
    for rank in (8, 9, 15):
        note_leave(run_dir, rank)
    change = nodes.change(run_dir, 3, {})
    assert change and (change.size, change.gone, change.why) == (2, {1}, "node 1 left")
    nodes.hosts = ["a", "b", "c"]
    assert (nodes.change(run_dir, 3, {}) or change).why == "b left"


def test_ranks_of_a_fixed_run_note_nothing(run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(ELASTIC)
    note_leave(run_dir, 0)
    assert not list((run_dir / "logs").iterdir())
