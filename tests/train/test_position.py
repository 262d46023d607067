"""What a rank says about where it is."""

from __future__ import annotations

import json
import threading
import time
from pathlib import Path

import pytest

from dtrain.train import position
from dtrain.train.position import Position
from tests.patience import until
from tests.world import spawn


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(position, "BEAT_S", 0.02)
    monkeypatch.setattr(position, "STILL_S", 0.1)


def content(path: Path) -> dict[str, object]:
    try:
        return dict(json.loads(path.read_text()))
    except ValueError:  # half-written
        return {}


def test_rank_0_writes_its_progress(tmp_path: Path) -> None:
    (tmp_path / "logs").mkdir()
    at = Position(tmp_path, 0)
    for step in range(1, 4):
        at.enter("data", step)
        at.enter("step", step)
    until(lambda: content(at.path).get("moves") == 6, "the last move in the file", 10)
    found = content(at.path)
    assert (found["phase"], found["step"]) == ("step", 3)
    assert found["counts"] == {"start": 1, "data": 3, "step": 2}
    at.end()


def test_the_slowest_of_the_recent_phases_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr(position.time, "perf_counter", lambda: now[0])
    (tmp_path / "logs").mkdir()
    at = Position(tmp_path, 3)
    at.end()
    for seconds in (9.0, *[1.0] * (position.RECENT - 1)):
        at.enter("step", 1)
        now[0] += seconds
    at.enter("data", 1)
    at._write()
    assert content(at.path)["slowest"] == {"start": 0.0, "step": 9.0}
    for seconds in (2.0, 1.0):  # the 9 s are now too old
        at.enter("step", 1)
        now[0] += seconds
    at.enter("data", 1)
    at._write()
    assert content(at.path)["slowest"]["step"] == 2.0  # type: ignore[index]


def test_other_ranks_write_only_while_they_stand_still(tmp_path: Path) -> None:
    (tmp_path / "logs").mkdir()
    at = Position(tmp_path, 1)
    first = at.path.stat().st_mtime_ns
    for step in range(30):
        at.enter("step", step)
        time.sleep(0.01)
    assert at.path.stat().st_mtime_ns == first
    until(lambda: "threads" in content(at.path), "its stacks", 10)
    stacks = content(at.path)["threads"]
    assert any("test_position.py" in line for line in stacks["MainThread"])  # type: ignore[index]
    at.end()


def test_a_folder_that_cannot_be_written_to_ends_nothing(tmp_path: Path) -> None:
    at = Position(tmp_path / "none", 0)
    at.enter("step", 1)
    time.sleep(0.1)
    assert any(thread.name == "dtrain-position" for thread in threading.enumerate())
    at.end()


def test_a_fault_in_private_parts_of_torch_does_not_end_the_thread(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(position, "groups", lambda: {}["a key that another version of torch does not have"])
    (tmp_path / "logs").mkdir()
    at = Position(tmp_path, 1)
    until(lambda: "threads" in content(at.path), "its stacks", 10)
    assert content(at.path)["groups"] == {}
    at.end()


def test_a_rank_that_fails_says_so(tmp_path: Path) -> None:
    at = Position(tmp_path, 0)
    with pytest.raises(RuntimeError), at:
        raise RuntimeError
    assert at.phase == "failing"
    at.end()


def test_collectives_that_have_not_ended_are_told() -> None:
    spawn(2, _one_rank_waits)


def _one_rank_waits() -> None:
    import torch
    import torch.distributed as dist

    rank = dist.get_rank()
    pair = dist.new_group([0, 1])
    dist.all_reduce(torch.ones(4))
    dist.all_reduce(torch.ones(2), group=pair)
    until(lambda: not any(group["open"] for group in position.groups().values()), "the end of both", 10)
    if rank == 0:
        work = dist.all_reduce(torch.ones(3, 5), group=pair, async_op=True)
        name = f"{dist.distributed_c10d._world.pg_names[pair]} gloo"
        found = position.groups()[name]
        assert found["ranks"] == [0, 1] and found["begun"] == 2
        assert found["open"] == [{"seq": 2, "op": "all_reduce", "sizes": [[3, 5]]}]
        assert found["calls"] == [[1, "all_reduce float[2]"], [2, "all_reduce float[3, 5]"]]
        dist.barrier()
        work.wait()
    else:
        dist.barrier()
        dist.all_reduce(torch.ones(3, 5), group=pair)
