"""The kinds of faults, each with what `dtrain why` must say about it. No torch: the launcher reads this table."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

VARIABLE = "DTRAIN_FAULT"  # kind:rank:step, for the ranks of one launch
INJECTED_FILE = "logs/injected-fault"  # the rank creates it right before the fault; its presence prevents a second one
HANG = ("cluster.hang_timeout=5",)
LOADER = ("train.loader_workers=1",)


@dataclass(frozen=True)
class Kind:
    """cause: the class that `dtrain why` reports (report/why.py)."""

    cause: str
    what: str
    phase: str = "step"  # of the loop, in which it happens; "start": before the rank joins the others
    overrides: tuple[str, ...] = ()  # that the launch needs
    names_rank: bool = True  # False: nothing tells one rank from the others
    strategies: tuple[str, ...] = ()  # (): all
    needs_cgroup: bool = False  # a memory limit that this process may set


KINDS = {
    # the code
    "exception": Kind("code", "the model raises an error"),
    "data-exception": Kind("code", "the dataset raises an error", "data"),
    "misleading-exception": Kind("code", "the user's code raises an error that reads like a lost connection"),
    "not-finite": Kind("numbers", "a loss becomes NaN", names_rank=False),
    "sys-exit": Kind("exit", "the user's code calls sys.exit(1)"),
    "exit-0": Kind("exit", "the process ends with exit code 0 before the run does"),
    "exit-7": Kind("exit", "the process ends with exit code 7, without an error"),
    "other-version": Kind("setup", "one rank has another version of dtrain", "start"),
    # the process
    "kill": Kind("killed", "SIGKILL, from outside"),
    "kill-at-start": Kind("killed", "SIGKILL before the rank joins the others", "start"),
    "segfault": Kind("crash", "C code reads address 0"),
    "abort": Kind("crash", "C code calls abort()"),
    "bus-error": Kind("crash", "a mapped file was truncated"),
    "terminate": Kind("stopped", "SIGTERM to one rank: the run saves and stops", names_rank=False),
    "launcher-killed": Kind("died", "SIGKILL to the launcher", names_rank=False),
    "loader-killed": Kind("loader", "SIGKILL to a loader process", "data", LOADER),
    # the machine
    "no-memory": Kind("memory", "an allocation that the host refuses"),
    "memory-kill": Kind("memory", "the kernel kills the process at its cgroup's memory limit", needs_cgroup=True),
    "io-error": Kind("storage", "a file cannot be read (EIO)", "data"),
    "disk-full": Kind("storage", "a file system is full (ENOSPC)", "data"),
    "file-handles": Kind("storage", "no file handle is left (EMFILE)", "data"),
    "connections": Kind("network", "the connections of one rank are cut", names_rank=False),
    "bit-flip": Kind("corruption", "one bit of a weight flips in one replica", strategies=("ddp",)),
    # hangs
    "sleep": Kind("hang", "the model sleeps", overrides=HANG),
    "loop": Kind("hang", "an endless loop", overrides=HANG),
    "lock": Kind("hang", "a lock that nobody releases", overrides=HANG),
    "global-lock": Kind("hang", "C code that does not release Python's global lock", overrides=HANG),
    "read": Kind("hang", "the dataset waits for a server that does not answer", "data", HANG),
    "stop": Kind("hang", "SIGSTOP", overrides=HANG),
    "loader-stopped": Kind("hang", "SIGSTOP to a loader process", "data", HANG + LOADER),
    # collectives that do not fit together
    "skipped-collective": Kind("collective", "one rank does not call a collective", overrides=HANG),
    "extra-collective": Kind("collective", "one rank calls a collective that no other rank calls", overrides=HANG),
    "swapped-collectives": Kind("collective", "one rank calls two collectives in the other order", overrides=HANG),
    "other-shape": Kind("collective", "one rank calls a collective with another shape", overrides=HANG),
}
ON_ALL_RANKS = ("swapped-collectives",)  # the others call them, too


def memory_cgroup() -> tuple[Path, str] | None:
    """Where a cgroup with a memory limit may be created, and the limit's file; None: nowhere."""
    for folder, limit in (("/sys/fs/cgroup/memory", "memory.limit_in_bytes"), ("/sys/fs/cgroup", "memory.max")):
        enabled = Path(folder, "cgroup.subtree_control")
        is_there = "memory" in enabled.read_text() if enabled.exists() else Path(folder, limit).exists()
        if is_there and os.access(folder, os.W_OK):
            return Path(folder), limit
    return None


@dataclass(frozen=True)
class Fault:
    kind: str
    rank: int
    step: int

    def __str__(self) -> str:
        return f"{self.kind}:{self.rank}:{self.step}"

    @classmethod
    def of_environment(cls) -> Fault | None:
        kind, _, place = os.environ.get(VARIABLE, "").partition(":")
        rank, _, step = place.partition(":")
        return cls(kind, int(rank), int(step)) if kind in KINDS else None
