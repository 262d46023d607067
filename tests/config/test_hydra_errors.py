"""What a user reads when Hydra, OmegaConf or the system refuses: one message, with a fix."""

from __future__ import annotations

import errno
from pathlib import Path

from hydra.errors import HydraException

from dtrain.config.hydra_errors import explain


def test_only_a_full_disk_is_explained_as_one(tmp_path: Path) -> None:
    path = str(tmp_path / "config.yaml")
    denied = explain(PermissionError(errno.EACCES, "Permission denied", path))
    assert denied == f"{path}: Permission denied\n  fix: check the path and its permissions"
    full = explain(OSError(errno.ENOSPC, "No space left on device", path))
    assert path in full and "there was no room" in full and "\n  fix: make room, or another folder" in full


def test_of_a_long_error_the_first_two_lines_are_shown() -> None:
    text = "Could not load the plugin\n\nIt needs a name\nSee https://hydra.cc\nin one of\n  a, b, c"
    assert explain(HydraException(text)) == (
        "Could not load the plugin It needs a name\n  fix: dtrain launch --help shows every group and setting"
    )
