"""A checked file comes back whole or not at all, only for what it was written for, and only from its owner."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from dtrain.util import checked_file
from dtrain.util.checked_file import UnusableFile

ABOUT = {"torch": "2", "shape": (1, 2)}
CONTENT = bytes(range(256)) * 3


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "one.checked"
    checked_file.write(path, ABOUT, CONTENT)
    return path


def test_the_content_comes_back(path: Path) -> None:
    os.utime(path, (0, 0))
    content, checksum = checked_file.read(path, ABOUT)
    assert content == CONTENT and len(checksum) == 64
    assert path.stat().st_mtime > 0, "it was used now"
    assert path.stat().st_mode & 0o777 == 0o600
    checked_file.write(path, ABOUT, b"")
    assert checked_file.read(path, ABOUT)[0] == b""
    with pytest.raises(FileNotFoundError):
        checked_file.read(path.with_name("none"), ABOUT)


def test_no_flipped_bit_and_no_missing_byte_is_accepted(path: Path) -> None:
    whole = path.read_bytes()
    damaged = [whole[:size] for size in range(0, len(whole), 7)]
    damaged += [whole[:i] + bytes([whole[i] ^ 1 << i % 8]) + whole[i + 1 :] for i in range(len(whole))]
    for content in (*damaged, whole + b"x"):
        path.write_bytes(content)
        with pytest.raises(UnusableFile):
            checked_file.read(path, ABOUT)


def test_a_file_for_something_else_is_refused(path: Path) -> None:
    with pytest.raises(UnusableFile, match="is for something else"):
        checked_file.read(path, ABOUT | {"torch": "3"})


def test_what_another_user_could_have_written_is_refused(path: Path, tmp_path: Path) -> None:
    for mode in (0o620, 0o602):
        path.chmod(mode)
        with pytest.raises(UnusableFile, match="this user's own"):
            checked_file.read(path, ABOUT)
    path.chmod(0o600)
    link = tmp_path / "link.checked"
    link.symlink_to(path)
    with pytest.raises(OSError):
        checked_file.read(link, ABOUT)
    if os.geteuid() == 0:
        os.chown(path, 12345, -1)
        with pytest.raises(UnusableFile, match="this user's own"):
            checked_file.read(path, ABOUT)
    shared = tmp_path / "shared"
    shared.mkdir()
    shared.chmod(0o777)
    with pytest.raises(UnusableFile, match="this user's own"):
        checked_file.private_folder(shared)
    (tmp_path / "to_folder").symlink_to(tmp_path)
    with pytest.raises(UnusableFile):
        checked_file.private_folder(tmp_path / "to_folder")
    assert checked_file.private_folder(tmp_path / "x" / "y").stat().st_mode & 0o777 == 0o700


def test_a_write_that_fails_leaves_the_old_file(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError):
        checked_file.write(path, ABOUT, b"new")
    assert checked_file.read(path, ABOUT)[0] == CONTENT and [p.name for p in path.parent.iterdir()] == [path.name]


def test_the_oldest_are_removed(tmp_path: Path) -> None:
    for age, name in enumerate(("new", "old", "older", "oldest")):
        path = tmp_path / f"{name}.checked"
        path.write_bytes(bytes(100))
        os.utime(path, (10_000 - age, 10_000 - age))
    (tmp_path / ".x.checked.1.tmp").write_bytes(b"")
    os.utime(tmp_path / ".x.checked.1.tmp", (0, 0))
    (tmp_path / "other").write_bytes(bytes(1000))
    checked_file.prune(tmp_path, 250)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["new.checked", "old.checked", "other"]
