"""Explain why nothing more can be written: bytes, inodes, a quota or shared memory, with the path and a fix.

"No space left on device" has several causes, and `df` shows room for most of them. Launcher and ranks import this
file, so it does not import torch.
"""

from __future__ import annotations

import errno
import os
import re
from pathlib import Path

from dtrain.errors import chain

SHARED_MEMORY = Path("/dev/shm")
LEAST_SHARED = 2**20  # bytes of it, below which no loader process and no NCCL starts
FULL = (errno.ENOSPC, errno.EDQUOT)
# What torch, NCCL and a loader killed by SIGBUS report when /dev/shm is full. Triton's "shared memory" is GPU memory,
# so these two words alone are not enough.
OF_SHARED_MEMORY = re.compile(
    r"killed by signal: Bus error|/dev/shm|shared memory\(shm\)|shared memory (object|file|segment)|</?torch_\d+", re.I
)


def shortage(path: Path, needed: int = 1) -> str:
    """Return what the file system of `path` has run out of, with a fix; "" if it has room for `needed` bytes."""
    path, usage = _usage(path)
    if usage is None:
        return ""  # not even statvfs works: the error itself must do
    free = usage.f_bavail * usage.f_frsize
    if _is_shared_memory(path) and (free < needed or _no_inodes(usage)):
        return shared_memory()
    if _no_inodes(usage):
        return (
            f"no inodes are left on the file system of {path}: all {usage.f_files:,} are in use, though {free:,} bytes "
            f"are free. Fix: remove files there (`df -i {path}` counts them)"
        )
    if free < needed and usage.f_blocks:  # 0 in /proc, and where a file system does not tell
        return f"the disk of {path} is full: {needed:,} bytes needed, {free:,} free. Fix: make room there"
    return ""


def free_bytes(path: Path) -> int | None:
    """Return the free bytes of the file system where `path` is or will be; None if it does not tell."""
    _, usage = _usage(path)
    return usage.f_bavail * usage.f_frsize if usage is not None and usage.f_blocks else None


def _usage(path: Path) -> tuple[Path, os.statvfs_result | None]:
    """Return the first folder upwards that exists, and its file system."""
    while not path.exists() and path != path.parent:
        path = path.parent
    try:
        return path, os.statvfs(path)
    except OSError:
        return path, None


def _no_inodes(usage: os.statvfs_result) -> bool:
    return usage.f_files > 0 and usage.f_favail == 0  # btrfs and others do not count inodes: f_files is 0


def _is_shared_memory(path: Path) -> bool:
    return path == SHARED_MEMORY or SHARED_MEMORY in path.parents


def shared_memory(otherwise: str = ", or a smaller train.loader_workers") -> str:
    """Describe the size of /dev/shm, with a fix. otherwise: another one."""
    try:
        usage = os.statvfs(SHARED_MEMORY)
    except OSError:
        return f"{SHARED_MEMORY} is missing. Fix: mount a tmpfs there"
    size, free = (size_text(blocks * usage.f_frsize) for blocks in (usage.f_blocks, usage.f_bavail))
    what = "has no inodes left" if _no_inodes(usage) else f"has {free} free now"
    return (
        f"{SHARED_MEMORY} (shared memory of processes) is too small: {size} in all, it {what}. Fix: a larger one "
        f"(docker run --shm-size=8g, or mount -o remount,size=8G {SHARED_MEMORY}){otherwise}"
    )


def size_text(num_bytes: int) -> str:
    return f"{num_bytes / 2**30:.1f} GiB" if num_bytes >= 2**30 else f"{num_bytes / 2**20:.1f} MiB"


def describe(error: OSError, path: Path, needed: int | None = None) -> OSError:
    """Return the error, or for a full file system one that says what ran out, where, and how to fix it."""
    if error.errno not in FULL:
        return error
    text = shortage(path, needed or 1)
    if not text and error.errno == errno.EDQUOT:
        text = "a quota is used up, of bytes or of files. Fix: make room (`quota -s` shows both)"
    if not text:  # space was freed in the meantime
        text = f"there was no room{f' for {needed:,} bytes' if needed else ''}. Fix: make room, or another folder"
    return OSError(error.errno, text, str(path))


def explain(error: BaseException, run_dir: Path) -> str:
    """Return the message of an error; if a full file system is the cause, also which one."""
    text = str(error)
    for cause in chain(error):
        if isinstance(cause, OSError) and cause.errno in FULL and "Fix: " not in str(cause):
            named = [Path(os.fsdecode(cause.filename))] if cause.filename else [run_dir, SHARED_MEMORY, Path("/tmp")]
            place = next((path for path in named if shortage(path)), named[0])
            more = str(describe(cause, place))
            return more if cause is error else f"{text}\n{more}"
        if OF_SHARED_MEMORY.search(str(cause)) and re.search(r"No space left|Bus error|Cannot allocate", str(cause)):
            return f"{text}\n{shared_memory()}"
    return text
