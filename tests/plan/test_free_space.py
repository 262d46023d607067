"""A start on a full disk or a full /dev/shm is refused, with its own fix, before ranks start."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from dtrain.launch.app import main
from dtrain.plan import free_space
from dtrain.util import disk_space
from tests.world import SMALL


@pytest.fixture
def small(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A file system of 2 MiB, under the working folder."""
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "small"
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=2m,nr_inodes=30", "tmpfs", str(folder)]
    mounted = subprocess.run(command, capture_output=True, text=True)
    if mounted.returncode:
        pytest.skip(f"a tmpfs cannot be mounted here: {mounted.stderr.strip()}")
    yield folder
    subprocess.run(["umount", "-l", str(folder)], check=True)


def refused(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    capsys.readouterr()
    assert main([*(str(word) for word in SMALL), "cluster.processes=1", *words]) == 2
    return capsys.readouterr().err


def test_a_disk_without_room(small: Path, capsys: pytest.CaptureFixture[str]) -> None:
    large = ["run_dir=small/run", "model.dim=512", "model.num_layers=4"]
    error = refused(capsys, *large)
    assert "one checkpoint has" in error and f"the disk of {small} has 2.0 MiB free" in error
    assert "checkpoint=none" in error and "force=true" in error
    assert main([*map(str, SMALL), "cluster.processes=1", *large, "dry_run=true"]) == 0, "a preview is no start"
    (small / "data").write_bytes(bytes(1_500_000))
    assert f"the disk of {small} is full: 1,048,576 bytes needed" in refused(capsys, "run_dir=small/run", "force=true")
    (small / "data").write_bytes(b"")
    with pytest.raises(OSError):
        for i in range(100):
            (small / f"file-{i}").touch()
    error = refused(capsys, "run_dir=small/run")
    assert f"no inodes are left on the file system of {small}" in error and "run_dir=… on another disk" in error


def test_a_full_shared_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    said = "/dev/shm (shared memory of processes) is too small: 64 MiB in all. Fix: docker run --shm-size=8g"
    monkeypatch.setattr(disk_space, "shortage", lambda path, needed=1: said)
    local = {"_target_": "dtrain.launch.local.Local", "processes": 2, "nodes": 1}
    config = {"cluster": local, "train": {"loader_workers": 2}}
    with pytest.raises(ValueError, match=r"train\.loader_workers=2: /dev/shm .*\n  fix: docker run --shm-size=8g"):
        free_space.check_shared_memory(config)
    free_space.check_shared_memory(config | {"train": {"loader_workers": 0}})  # gloo needs none
