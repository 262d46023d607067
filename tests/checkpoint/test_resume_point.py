"""A damaged checkpoint is renamed and an older one is used; never does a run start anew without a word."""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path

import pytest

from dtrain.checkpoint import integrity, resume_point, shards, store
from dtrain.checkpoint.store import CheckpointError
from tests.checkpoint.small_state import assert_holds, flip, saved
from tests.world import make_run, summary, train


@pytest.mark.parametrize("damage", ["flip", "truncate", "remove", "manifest"])
def test_a_damaged_one_is_put_aside_and_the_older_used(damage: str, tmp_path: Path) -> None:
    saved(tmp_path, 1, 2)
    shard = tmp_path / "step-00000002" / "rank-00000.safetensors"
    if damage == "flip":
        flip(shard, 8 * (shard.stat().st_size - 1))
    elif damage == "truncate":
        os.truncate(shard, 100)
    elif damage == "remove":
        shard.unlink()
    else:
        (tmp_path / "step-00000002" / "manifest.json").write_text("{")
    said: list[str] = []
    found = resume_point.newest_good(tmp_path, said.append)
    assert found is not None and found[1]["step"] == 1
    assert_holds(*found, 1.0)
    assert "step-00000002 is damaged" in said[0]
    assert len(list(tmp_path.glob("step-00000002.corrupt-*"))) == 1


def test_a_folder_that_lost_its_manifest_is_damaged_and_no_fresh_start(tmp_path: Path) -> None:
    saved(tmp_path, 1, 2)
    (tmp_path / "step-00000002" / "manifest.json").unlink()
    found = resume_point.newest_good(tmp_path, lambda text: None)
    assert found is not None and found[1]["step"] == 1
    saved(tmp_path, 2)
    (tmp_path / "step-00000002" / "manifest.json").unlink()
    saved(tmp_path, 2)  # a save never gives way to a damaged folder of the same name
    assert integrity.verify(tmp_path / "step-00000002") == ""
    assert len(list(tmp_path.glob("step-00000002.corrupt-*"))) == 2


def test_a_disk_that_does_not_answer_is_no_damage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    saved(tmp_path, 1)

    def broken(path: Path) -> str:
        raise OSError(errno.EIO, "Input/output error", str(path))

    monkeypatch.setattr(shards, "sha256", broken)
    with pytest.raises(CheckpointError, match="Input/output error"):
        resume_point.newest_good(tmp_path)
    monkeypatch.undo()
    assert resume_point.newest_good(tmp_path) is not None


def test_a_newer_format_is_refused_and_left_alone(tmp_path: Path) -> None:
    saved(tmp_path, 1)
    content = json.loads((tmp_path / "step-00000001" / "manifest.json").read_text())
    store.write_manifest(tmp_path / "step-00000001", content | {"format": "dtrain-9"})
    with pytest.raises(CheckpointError, match="has the format dtrain-9, this version of dtrain reads dtrain-2"):
        resume_point.newest_good(tmp_path)
    assert (tmp_path / "step-00000001").is_dir()


def test_a_reader_puts_nothing_aside(tmp_path: Path) -> None:
    saved(tmp_path, 1, 2)
    flip(tmp_path / "step-00000002" / "rank-00000.safetensors", 999)
    found = resume_point.newest_good(tmp_path, lambda text: None, quarantine=False)
    assert found is not None and found[1]["step"] == 1 and (tmp_path / "step-00000002").is_dir()


def test_all_damaged_is_an_error_and_never_a_fresh_start(tmp_path: Path) -> None:
    saved(tmp_path, 1)
    flip(tmp_path / "step-00000001" / "rank-00000.safetensors", 999)
    for _ in range(2):  # also the second time, when only the .corrupt folder is left
        with pytest.raises(CheckpointError, match="no usable checkpoint is left"):
            resume_point.newest_good(tmp_path, lambda text: None)


def test_a_run_falls_back_on_all_ranks_and_says_so(tmp_path: Path) -> None:
    run = make_run(
        tmp_path / "run",
        "strategy=fsdp",
        "cluster.processes=2",
        "train.steps=9",
        "checkpoint.every=3",
        "train.stop_after=6",
    )
    assert train(run, 2) == [0, 0]
    flip(run / "checkpoints" / "step-00000006" / "rank-00001.safetensors", 5000)
    make_run(run, "strategy=fsdp", "cluster.processes=2", "train.steps=9", "checkpoint.every=3")
    assert train(run, 2) == [0, 0]
    assert summary(run)["start_step"] == 3 and summary(run)["steps"] == 9
