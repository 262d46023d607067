"""Copies of a run's checkpoints in this host's memory (checkpoint.peer): where they are, and when they are removed.

They are files in /dev/shm, so that they outlive the ranks. The folder belongs to this user alone. Launcher and ranks
import this file, so it does not import torch.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import shutil
import stat
import sys
from pathlib import Path

from dtrain.runs.folder import checkpoints, read_json
from dtrain.runs.folder import newest_step as folder_step
from dtrain.util.disk_space import SHARED_MEMORY


def folder(run_dir: Path, root: Path | None = None) -> Path:
    """Return the folder of a run's copies; it need not exist."""
    found = read_json(run_dir / "launch.json").get("id")
    run = found if isinstance(found, str) else str(run_dir.resolve())
    return (root or SHARED_MEMORY) / f"dtrain-{os.getuid()}" / hashlib.sha256(run.encode()).hexdigest()[:32]


def is_private(path: Path) -> bool:
    """Return whether only this user can have written into the folder of a run's copies."""
    try:
        found = [os.lstat(p) for p in (path.parent, path)]
    except OSError:
        return False
    return all(stat.S_ISDIR(s.st_mode) and s.st_uid == os.getuid() and not s.st_mode & 0o077 for s in found)


def create(path: Path) -> None:
    """Create the folder of a run's copies. Refuse one that another user has created first."""
    for each in (path.parent, path):
        with contextlib.suppress(FileExistsError):
            os.mkdir(each, 0o700)
    if not is_private(path):
        raise OSError(errno.EPERM, "is not a folder that this user alone can write to", str(path))


def newest_step(run_dir: Path) -> int:
    """Return the step of the newest copy on this host, without checking it; -1 if there is none."""
    path = folder(run_dir)
    return max((int(p.name[5:]) for p in checkpoints(path)), default=-1) if is_private(path) else -1


def remove_old(run_dir: Path) -> str:
    """Remove a run's copies from this host after its last attempt; if one is newer than the disk, return what remains.

    A run that failed for good can then still be resumed from it.
    """
    path = folder(run_dir)
    if newest_step(run_dir) > folder_step(run_dir):
        return f"step {newest_step(run_dir)} is in memory only: resume the run on this host, or rm -r {path}"
    remove(run_dir)
    return ""


def remove(run_dir: Path) -> None:
    """Remove a run's copies from this host."""
    path = folder(run_dir)
    if is_private(path):
        shutil.rmtree(path, ignore_errors=True)


if __name__ == "__main__":  # on each node of a SLURM job that has ended for good (launch/slurm_job.py)
    remove(Path(sys.argv[1]))
