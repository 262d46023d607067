"""Injects one fault into a rank: real signals, real errors of the kernel, real hangs.

The loop notes its position at each phase of each step. The injector wraps that note, so the training code knows
nothing of faults. Lines of this file count as the user's code in error reports (runs/causes.py).
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import multiprocessing
import os
import re
import signal
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from dtrain.faults.kinds import INJECTED_FILE, KINDS, ON_ALL_RANKS, Fault, memory_cgroup


def install(position: type[Any], run_dir: Path, rank: int) -> None:
    """Wrap `position.enter`, so that the fault of the environment happens at its rank and step, once per run."""
    fault, mark = Fault.of_environment(), run_dir / INJECTED_FILE
    if fault is None or mark.exists() or (rank != fault.rank and fault.kind not in ON_ALL_RANKS):
        return
    phase, is_victim = KINDS[fault.kind].phase, rank == fault.rank
    happen = FAULTS[fault.kind]
    usual, done = position.enter, False

    def note() -> None:
        if is_victim:
            mark.touch()

    def enter(self: Any, name: str, step: int) -> None:
        nonlocal done
        usual(self, name, step)
        if fault.kind in ON_ALL_RANKS and name == phase and (step < fault.step or not is_victim):
            happen(False, None)
        elif not done and name == phase and step >= fault.step:
            done = True
            note()
            happen(is_victim, sys._getframe(1).f_locals.get("run"))

    if phase == "start":
        note()
        happen(is_victim, None)
    else:
        position.enter = enter


# ---- the code ------------------------------------------------------------------------------------------------------


def exception(victim: bool, run: Any) -> None:
    raise RuntimeError("injected: shapes [4, 3] and [4, 2] do not fit")


def data_exception(victim: bool, run: Any) -> None:
    raise ValueError("injected: record 17 cannot be parsed")


def misleading_exception(victim: bool, run: Any) -> None:
    raise ConnectionResetError("injected: [Errno 104] Connection reset by peer")


def not_finite(victim: bool, run: Any) -> None:
    def poison(module: Any, inputs: Any, output: Any) -> Any:
        handle.remove()
        return output * float("nan")

    handle = run.strategy.module.register_forward_hook(poison)


def sys_exit(victim: bool, run: Any) -> None:
    sys.exit(1)


def exit_0(victim: bool, run: Any) -> None:
    os._exit(0)


def exit_7(victim: bool, run: Any) -> None:
    os._exit(7)


def other_version(victim: bool, run: Any) -> None:
    import dtrain

    dtrain.__version__ = "0.0.0"


# ---- the process ---------------------------------------------------------------------------------------------------


def kill(victim: bool, run: Any) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def segfault(victim: bool, run: Any) -> None:
    ctypes.string_at(0)


def abort(victim: bool, run: Any) -> None:
    os.abort()


def bus_error(victim: bool, run: Any) -> None:
    with tempfile.TemporaryFile() as file:
        file.truncate(mmap.PAGESIZE)
        mapped = mmap.mmap(file.fileno(), mmap.PAGESIZE)
        file.truncate(0)
        mapped[0]


def terminate(victim: bool, run: Any) -> None:
    os.kill(os.getpid(), signal.SIGTERM)


def launcher_killed(victim: bool, run: Any) -> None:
    """The launcher is the parent of the starter, or torchrun, which is the parent of this rank."""
    fields = Path(f"/proc/{os.getppid()}/stat").read_text().rpartition(")")[2].split()
    os.kill(int(fields[1]), signal.SIGKILL)
    time.sleep(60)  # this process dies with its parents


def loader_killed(victim: bool, run: Any) -> None:
    os.kill(a_loader(), signal.SIGKILL)


def a_loader() -> int:
    found = multiprocessing.active_children()
    assert found and found[0].pid, "a loader process is needed: train.loader_workers=1"
    return found[0].pid


# ---- the machine ---------------------------------------------------------------------------------------------------


def no_memory(victim: bool, run: Any) -> None:
    torch.empty(2**50)


def memory_kill(victim: bool, run: Any) -> None:
    """Put this process into a cgroup with little more memory than it has, and use more."""
    found = memory_cgroup()
    assert found is not None, "a cgroup that can be written to is needed"
    folder, limit = found
    group = folder / f"dtrain-fault-{os.getpid()}"
    group.mkdir()
    (group / "cgroup.procs").write_text(str(os.getpid()))
    (group / limit).write_text(str(2**26))
    hold = []
    while True:
        hold.append(b"x" * 2**24)


def io_error(victim: bool, run: Any) -> None:
    os.pread(os.open("/proc/self/mem", os.O_RDONLY), 1, 0)  # address 0 is mapped by no process


def disk_full(victim: bool, run: Any) -> None:
    with open("/dev/full", "wb") as file:
        file.write(b"x")
        file.flush()


def file_handles(victim: bool, run: Any) -> None:
    hold = []
    while True:
        hold.append(open(os.devnull))  # noqa: SIM115


def connections(victim: bool, run: Any) -> None:
    """Shut down every TCP connection of this process."""
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError), socket.socket(fileno=os.dup(int(name))) as one:
            if one.family in (socket.AF_INET, socket.AF_INET6):
                one.getpeername()  # fails for a socket that listens
                one.shutdown(socket.SHUT_RDWR)


def bit_flip(victim: bool, run: Any) -> None:
    weight = max(run.strategy.module.parameters(), key=lambda p: p.numel())
    with torch.no_grad():
        weight.view(-1).view(torch.int32)[7] ^= 1 << 20


# ---- hangs ---------------------------------------------------------------------------------------------------------


def sleep(victim: bool, run: Any) -> None:
    while True:
        time.sleep(1000)  # a signal ends one sleep


def loop(victim: bool, run: Any) -> None:
    while True:
        pass


def lock(victim: bool, run: Any) -> None:
    held = threading.Lock()
    held.acquire()
    held.acquire()


def global_lock(victim: bool, run: Any) -> None:
    re.match("(a+)+$", "a" * 99 + "b")


def read(victim: bool, run: Any) -> None:
    """Connect to a server that accepts the connection and then says nothing."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        socket.create_connection(server.getsockname()).recv(1)


def stop(victim: bool, run: Any) -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


def loader_stopped(victim: bool, run: Any) -> None:
    os.kill(a_loader(), signal.SIGSTOP)


# ---- collectives ---------------------------------------------------------------------------------------------------


def skipped_collective(victim: bool, run: Any) -> None:
    """The next all-reduce of this rank that is not the vote's asynchronous one does not happen."""
    replace_next_all_reduce(lambda tensor, *args, **kwargs: None)


def other_shape(victim: bool, run: Any) -> None:
    """The next all-reduce of this rank that is not the vote's asynchronous one has one element more."""
    usual = dist.all_reduce
    replace_next_all_reduce(lambda tensor, *args, **kwargs: usual(torch.ones(tensor.numel() + 1), *args, **kwargs))


def replace_next_all_reduce(other: Callable[..., None]) -> None:
    usual = dist.all_reduce

    def once(tensor: Any, *args: Any, **kwargs: Any) -> Any:
        if kwargs.get("async_op") or threading.current_thread() is not threading.main_thread():  # a vote, a save
            return usual(tensor, *args, **kwargs)
        dist.all_reduce = usual
        return other(tensor, *args, **kwargs)

    dist.all_reduce = once


def extra_collective(victim: bool, run: Any) -> None:
    dist.broadcast(torch.ones(3), 0)


def swapped_collectives(swap: bool, run: Any) -> None:
    """All ranks call two collectives in each step, as a model may; the victim once in the other order."""
    calls: list[Callable[[], Any]] = [
        lambda: dist.broadcast(torch.ones(3), 0),
        lambda: dist.all_reduce(torch.ones(5)),
    ]
    for call in reversed(calls) if swap else calls:
        call()


FAULTS: dict[str, Callable[[bool, Any], None]] = {
    name: globals()[name.replace("-", "_")] for name in KINDS if name != "kill-at-start"
} | {"kill-at-start": kill}
