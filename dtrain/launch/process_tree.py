"""A program whose descendants never outlive it, however it is ended: also a shell script's, and those in own sessions.

Two processes watch over the program, one the parent of the other. Both are subreapers: the kernel gives them the
descendants whose own parent has ended. Whichever of the two is killed, the other one kills all that is left.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import time
import traceback
from collections.abc import Callable
from pathlib import Path

from dtrain.runs.protocol import FAILED

PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36
PARENT_ENDED = signal.SIGRTMIN  # sent by the kernel, and used by nothing else
GONE_S = 10.0  # to wait for killed processes: one that waits for a dead file server does not end


def run_in_child(work: Callable[[], int]) -> int:
    """Run `work` in a child process, and return its exit code, negative for a signal. All that it started has ended."""
    adopt_orphans()
    parent, child = os.getpid(), os.fork()
    if child == 0:
        _be_child(work, parent)
    _, status = os.waitpid(child, 0)
    kill_descendants()
    return os.waitstatus_to_exitcode(status)


def _be_child(work: Callable[[], int], parent: int) -> None:
    code = FAILED
    try:
        adopt_orphans()
        signal.signal(PARENT_ENDED, lambda *_: _leave(FAILED))
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, PARENT_ENDED)
        if os.getppid() == parent:  # else it ended before the kernel was asked
            code = work()
    except BaseException:  # must not return into the parent's code
        traceback.print_exc()
    _leave(code)


def _leave(code: int) -> None:
    kill_descendants()
    os._exit(code)


def adopt_orphans() -> None:
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1)


def kill_descendants() -> None:
    """Kill the children, and then those that these leave behind, until there are none."""
    deadline = time.monotonic() + GONE_S
    while (children := children_of(os.getpid())) and time.monotonic() < deadline:
        for pid in children:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        time.sleep(0.005)


def children_of(parent: int) -> list[int]:
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # ended in the meantime
            fields = (folder / "stat").read_bytes().rpartition(b")")[2].split()  # a name may hold blanks and brackets
            if int(fields[1]) == parent:
                found.append(int(folder.name))
    return found
