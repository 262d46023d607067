"""What the launcher and the ranks agree on: exit codes, how a stop is asked for, the port and the folder of sockets.

Both sides import this file, so it imports neither torch nor Hydra.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import random
import re
import signal
import socket
import sys
import time
from collections.abc import MutableMapping
from pathlib import Path

DONE, BAD_CONFIG, FAILED, PREFLIGHT, PREEMPTED = 0, 2, 3, 4, 75
STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2)
CANCELLED_FILE = "cancelled"  # in the run folder: `dtrain cancel` leaves it, and such a run is not queued again
ATTEMPTS_FILE = "attempts.jsonl"  # each start of a job and how it ended, a line each
STOP_FILE = "stop"  # in the run folder: the launcher's way to ask for a stop; `touch RUN/stop` works too


# What a collective of gloo or NCCL reports when a peer has gone. The text alone is no evidence: see causes.py
LOST_PEER = re.compile(r"(closed|reset) by peer|Broken pipe|Socket Timeout|remote process exited|ncclRemoteError", re.I)


def name_slurm_rank(environ: MutableMapping[str, str]) -> None:
    """What torchrun would set, from what srun does; MASTER_ADDR and MASTER_PORT come from the supervisor."""
    num_ranks, num_nodes = int(environ["SLURM_STEP_NUM_TASKS"]), int(environ["SLURM_STEP_NUM_NODES"])
    environ["RANK"], environ["WORLD_SIZE"] = environ["SLURM_PROCID"], str(num_ranks)
    environ["LOCAL_RANK"], environ["LOCAL_WORLD_SIZE"] = environ["SLURM_LOCALID"], str(num_ranks // num_nodes)


def die_with_parent() -> None:
    """Ask the kernel to kill this process when its parent ends, from now on and however it ends: no orphans."""
    pr_set_pdeathsig = 1
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGKILL)


MOST_PATIENCE = 8.0  # times as long as on a quiet machine; what takes longer than that hangs
QUIET_S = 0.025  # what the sum below takes on a quiet core of 2.5 GHz


def slowness() -> float:
    """How many times as long as on a quiet machine things take here now, from 1 on: by a small task and the load."""
    began = time.perf_counter()
    sum(range(10**6))
    task = (time.perf_counter() - began) / QUIET_S
    with contextlib.suppress(OSError):
        task = max(task, os.getloadavg()[0] / (os.cpu_count() or 1))
    return min(MOST_PATIENCE, max(1.0, task))


class Deadline:
    """The end of a wait for other processes: `seconds` from now on a quiet machine, later on a busy one."""

    def __init__(self, seconds: float) -> None:
        self.began, self.seconds, self.slowness = time.monotonic(), seconds, 1.0

    def left(self) -> float:
        """Seconds; 0 or less when the wait is over. Only then the machine's speed is measured, as that costs time."""
        waited = time.monotonic() - self.began
        if waited >= self.seconds * self.slowness:
            self.slowness = max(self.slowness, slowness())
        return self.seconds * self.slowness - waited

    def __str__(self) -> str:
        """How long it has been, for the message of who gives up."""
        return f"{time.monotonic() - self.began:.0f} s on a machine {self.slowness:.1f} times as slow as a quiet one"


def free_port() -> int:
    """A port that is free on this machine, the first node: a fixed number would meet another job's.

    Not one that the kernel gives to outgoing connections: rank 0 takes it only when it has imported torch.
    """
    try:
        first_of_kernel = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    except (OSError, ValueError):
        first_of_kernel = 32768
    tries = random.SystemRandom().sample(range(15_000, 30_000), 50)  # a user's seed would give two jobs the same
    for port in [*(port for port in tries if port < first_of_kernel), 0]:
        with contextlib.suppress(OSError), socket.socket() as server:
            server.bind(("", port))
            return int(server.getsockname()[1])
    raise OSError("no port is free")


# Of TMPDIR, in bytes: a socket's path has at most 107, of which a folder of ours takes 22 and a socket's name 18.
LONGEST_TMP = 67
SOCKETS = "DTRAIN_SOCKETS"  # a folder that the launcher makes for its ranks, and removes however they end


def short_tmp() -> str:
    """A folder for temporary files in which sockets can be: not every cluster's TMPDIR is short enough."""
    import tempfile

    usual = tempfile.gettempdir()
    for folder in (usual, "/tmp", "/var/tmp", "/dev/shm"):
        if len(os.fsencode(folder)) <= LONGEST_TMP and os.access(folder, os.W_OK):
            return folder
    raise ValueError(
        f"TMPDIR={usual}: has more than {LONGEST_TMP} characters, too many for sockets, and /tmp cannot be written to\n"
        "  fix: set a shorter TMPDIR"
    )


def place_sockets() -> None:
    """Before processes are forked that send each other files: one folder for the sockets of all, with a short name.

    Else each makes its own in TMPDIR, and where that is long, a loader's processes cannot send a batch, and whoever
    waits for it waits for ever.
    """
    import multiprocessing.util  # a command that starts no processes need not wait for it
    import shutil
    import tempfile

    config = multiprocessing.current_process()._config  # type: ignore[attr-defined]  # what is forked inherits it
    if config.get("tempdir"):
        return
    config["tempdir"] = os.environ.get(SOCKETS)
    if not config["tempdir"]:
        config["tempdir"] = folder = tempfile.mkdtemp(prefix="pymp-", dir=short_tmp())
        multiprocessing.util.Finalize(None, shutil.rmtree, (folder, True), exitpriority=-100)


def remove_sockets() -> None:
    """For a rank that has made its own folder, and ends without Python's clearing up."""
    if "multiprocessing.util" in sys.modules and SOCKETS not in os.environ:
        import multiprocessing
        import shutil

        if folder := multiprocessing.current_process()._config.get("tempdir"):  # type: ignore[attr-defined]
            shutil.rmtree(folder, ignore_errors=True)
