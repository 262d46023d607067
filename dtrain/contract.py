"""What the launcher and the ranks agree on: exit codes, and how a stop is asked for.

Both sides import this file, so it imports neither torch nor Hydra.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
import signal
import sys
from collections.abc import MutableMapping

DONE, BAD_CONFIG, FAILED, PREFLIGHT, PREEMPTED = 0, 2, 3, 4, 75
STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2)
CANCELLED_FILE = "cancelled"  # in the run folder: `dtrain cancel` leaves it, and such a run is not queued again
ATTEMPTS_FILE = "attempts.jsonl"  # each start of a job and how it ended, a line each
STOP_FILE = "stop"  # in the run folder: the launcher's way to ask for a stop; `touch RUN/stop` works too


# what a rank says whose peer has gone: gloo, NCCL
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


def place_sockets() -> None:
    """Before processes are forked that send each other files: one folder for the sockets of all, with a short name.

    A socket's path has at most 107 bytes, of which Python's own names take 33. Some clusters give a job a TMPDIR that
    is longer than the rest, and then a loader's processes cannot send a batch, and whoever waits for it waits for ever.
    """
    import multiprocessing.util  # a command that starts no processes need not wait for it
    import tempfile

    config = multiprocessing.current_process()._config  # type: ignore[attr-defined]  # what is forked inherits it
    usual = tempfile.gettempdir()
    if config.get("tempdir"):
        return
    for folder in ("/tmp", "/var/tmp", "/dev/shm") if len(os.fsencode(usual)) > 74 else ():
        with contextlib.suppress(OSError):
            config["tempdir"] = tempfile.mkdtemp(prefix="pymp-", dir=folder)
            multiprocessing.util.Finalize(None, remove_sockets, exitpriority=-100)
            return
    multiprocessing.util.get_temp_dir()


def remove_sockets() -> None:
    """For who ends without Python's own clearing up."""
    if "multiprocessing.util" in sys.modules:
        import multiprocessing
        import shutil

        folder = multiprocessing.current_process()._config.get("tempdir")  # type: ignore[attr-defined]
        if folder:
            shutil.rmtree(folder, ignore_errors=True)
