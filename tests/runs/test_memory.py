"""Copies in memory: a folder of this user alone, and what is left of it after a run."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from dtrain.runs import memory


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(memory, "SHARED_MEMORY", tmp_path / "shm")
    (tmp_path / "shm").mkdir()
    (tmp_path / "run").mkdir()
    return tmp_path / "run"


def copy(run: Path, step: int) -> None:
    memory.create(memory.folder(run))
    (memory.folder(run) / f"step-{step:08d}").mkdir()


def on_disk(run: Path, step: int) -> None:
    path = run / "checkpoints" / f"step-{step:08d}"
    path.mkdir(parents=True)
    (path / "manifest.json").write_text("{}")


def test_a_run_is_known_by_its_id_and_its_name_cannot_leave_the_folder(run: Path) -> None:
    before = memory.folder(run)
    (run / "launch.json").write_text(json.dumps({"id": "../../etc"}))
    path = memory.folder(run)
    assert path != before and path.parent == before.parent and path.name.isalnum()
    moved = run.rename(run.with_name("moved"))
    assert memory.folder(moved) == path


def test_what_is_older_than_the_disk_is_removed(run: Path) -> None:
    assert memory.newest_step(run) == -1 and memory.remove_old(run) == ""
    copy(run, 4)
    on_disk(run, 4)
    assert memory.newest_step(run) == 4
    assert memory.remove_old(run) == "" and not memory.folder(run).exists()


def test_what_is_newer_than_the_disk_stays_and_is_reported(run: Path) -> None:
    copy(run, 5)
    on_disk(run, 4)
    assert "step 5 is in memory only" in memory.remove_old(run) and memory.newest_step(run) == 5


def test_the_folder_of_others_is_neither_read_nor_removed(run: Path) -> None:
    copy(run, 5)
    on_disk(run, 6)
    memory.folder(run).parent.chmod(0o755)
    assert memory.newest_step(run) == -1 and memory.remove_old(run) == "" and memory.folder(run).exists()
    with pytest.raises(PermissionError, match="this user alone"):
        memory.create(memory.folder(run))
