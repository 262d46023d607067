"""The protocol between launcher and ranks: exit codes, stop requests, the port and the folder for sockets.

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
CANCELLED_FILE = "cancelled"  # in the run folder: `dtrain cancel` writes it, and the run is not requeued
ATTEMPTS_FILE = "attempts.jsonl"  # one line per start and per end of a job
POSITION_FILE = "logs/position-{}.json"  # where a rank is; rank 0 writes it once a second
HANG_FILE = "logs/hang.json"  # while the run stands still: the positions of all ranks
STACK_SIGNAL = signal.SIGURG  # a rank prints its stacks into its log; programs without a handler ignore this signal
STOP_FILE = "stop"  # in the run folder: the launcher's stop request; `touch RUN/stop` works too
GO_BACK = "go-back.json"  # in RUN/checkpoints, by the launcher: the step of resume=RUN@STEP, until a rank has done it
SCALE_FILE = "scale.json"  # in the run folder: `dtrain scale` writes the wanted number of ranks or nodes
LEAVE_FILE = "logs/leave-{}"  # a rank of an elastic run that got a stop signal of its own
RESCUE_FILE = "logs/rescue"  # made by the rank that saves alone after a peer was lost
# ---- of a user's own program (script=FILE)
CHECK_FOLDER = "DTRAIN_CHECK"  # set by `dtrain verify script=`: where dtrain.check notes the steps
SCRIPT_RUN = "DTRAIN_RUN_DIR"  # set for the program: the run folder
SCRIPT_TYPED = "DTRAIN_PROGRAMS"  # set by the launcher: the programs that were typed, one in a line
SCRIPT_ASKS = "logs/asks-{}"  # the program of this rank uses dtrain.script to ask for stops: it gets no signal
SCRIPT_STOPPED = "logs/stopped-{}"  # the program of this rank ended because it was asked to
SCRIPT_STOP_AT = "logs/stop-at.json"  # after which call of stop_requested all ranks stop

# ---- of a node that a container engine starts (dtrain/launch/pod.py)
NODE_RANK = "DTRAIN_NODE_RANK"  # its number, where the engine has no variable of its own for it
POD_IP = "DTRAIN_POD_IP"  # its address
RUN_FILES = "DTRAIN_RUN_FILES"  # JSON of name to text: the configuration, where an engine cannot mount files
RENDEZVOUS_FILE = "logs/rendezvous.json"  # address and port of the first node while it runs

STARTER = "DTRAIN_STARTER"  # the process that started a rank, where that is neither torchrun nor srun
ELASTIC = "DTRAIN_ELASTIC"  # set for the ranks if a rank may leave without ending the run


# What a gloo, NCCL or Horovod collective reports when a peer is gone. The text alone is no evidence: see causes.py
LOST_PEER = re.compile(
    r"(closed|reset) by peer|Broken pipe|Socket Timeout|remote process exited|ncclRemoteError|Horovod has been shut",
    re.I,
)


def name_slurm_rank(environ: MutableMapping[str, str]) -> None:
    """Set torchrun's variables from srun's; MASTER_ADDR and MASTER_PORT come from the supervisor."""
    num_ranks, num_nodes = int(environ["SLURM_STEP_NUM_TASKS"]), int(environ["SLURM_STEP_NUM_NODES"])
    environ["RANK"], environ["WORLD_SIZE"] = environ["SLURM_PROCID"], str(num_ranks)
    environ["LOCAL_RANK"], environ["LOCAL_WORLD_SIZE"] = environ["SLURM_LOCALID"], str(num_ranks // num_nodes)


def die_with_parent(parent: int | None = None) -> None:
    """Ask the kernel to kill this process when its parent ends for any reason: no orphans.

    With the parent's number, this process also ends if the parent had ended before the kernel was asked.
    """
    pr_set_pdeathsig = 1
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGKILL)
    if parent is not None and os.getppid() != parent:
        os._exit(1)


def pid_namespace() -> str:
    """Identify the processes that this process's numbers of processes mean: this machine, outside of containers."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip() + os.readlink("/proc/self/ns/pid")
    except OSError:
        return socket.gethostname()


def note_leave(run_dir: Path, rank: int) -> None:
    """Note that this rank was asked to stop, for the supervisor of an elastic run; called by a signal handler."""
    if ELASTIC in os.environ:
        with contextlib.suppress(OSError):  # on a full disk, the run stops for all ranks
            (run_dir / LEAVE_FILE.format(rank)).touch()


MOST_PATIENCE = 8.0  # upper limit of slowness(); anything slower hangs
QUIET_S = 0.025  # duration of the sum below on an idle 2.5 GHz core


def slowness() -> float:
    """Estimate how many times slower than an idle machine this one is, at least 1: from a small task and the load."""
    began = time.perf_counter()
    sum(range(10**6))
    task = (time.perf_counter() - began) / QUIET_S
    with contextlib.suppress(OSError):
        task = max(task, os.getloadavg()[0] / (os.cpu_count() or 1))
    return min(MOST_PATIENCE, max(1.0, task))


class Deadline:
    """The end of a wait for other processes: after `seconds` on an idle machine, later on a busy one."""

    def __init__(self, seconds: float) -> None:
        self.began, self.seconds, self.slowness = time.monotonic(), seconds, 1.0

    def left(self) -> float:
        """Return the seconds left; 0 or less: time is up. Only then measures the machine's speed, which takes time."""
        waited = time.monotonic() - self.began
        if waited >= self.seconds * self.slowness:
            self.slowness = max(self.slowness, slowness())
        return self.seconds * self.slowness - waited

    def __str__(self) -> str:
        """Describe how long the wait took, for a timeout message."""
        return f"{time.monotonic() - self.began:.0f} s on a machine {self.slowness:.1f} times as slow as a quiet one"


def free_port() -> int:
    """Return a free port on this machine, the first node: a fixed port could collide with another job's.

    Avoids the range for outgoing connections: rank 0 binds the port only after importing torch.
    """
    try:
        first_of_kernel = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    except (OSError, ValueError):
        first_of_kernel = 32768
    tries = random.SystemRandom().sample(range(15_000, 30_000), 50)  # unseeded: two jobs must not draw the same
    for port in [*(port for port in tries if port < first_of_kernel), 0]:
        with contextlib.suppress(OSError), socket.socket() as server:
            server.bind(("", port))
            return int(server.getsockname()[1])
    raise OSError("no port is free")


# Of TMPDIR, in bytes: a socket's path has at most 107, of which our folder takes 22 and a socket's name 18.
LONGEST_TMP = 67
SOCKETS = "DTRAIN_SOCKETS"  # a folder that the launcher creates for its ranks, and removes however they end


def short_tmp() -> str:
    """Return a temporary folder whose path is short enough for sockets; TMPDIR on some clusters is too long."""
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
    """Set one short-named folder for all sockets, before forking processes that send each other file descriptors.

    Otherwise each process creates its own in TMPDIR. If that path is too long, loader workers cannot send a batch, and
    the receiver waits forever.
    """
    import multiprocessing.util  # slow import, only needed by commands that start processes
    import shutil
    import tempfile

    config = multiprocessing.current_process()._config  # type: ignore[attr-defined]  # inherited by forked processes
    if config.get("tempdir"):
        return
    config["tempdir"] = os.environ.get(SOCKETS)
    if not config["tempdir"]:
        config["tempdir"] = folder = tempfile.mkdtemp(prefix="pymp-", dir=short_tmp())
        multiprocessing.util.Finalize(None, shutil.rmtree, (folder, True), exitpriority=-100)


def remove_sockets() -> None:
    """Remove the folder of a rank that created its own and exits without Python's cleanup."""
    if "multiprocessing.util" in sys.modules and SOCKETS not in os.environ:
        import multiprocessing
        import shutil

        if folder := multiprocessing.current_process()._config.get("tempdir"):  # type: ignore[attr-defined]
            shutil.rmtree(folder, ignore_errors=True)
