"""What the launcher and the ranks agree on: exit codes, and how a stop is asked for.

Both sides import this file, so it imports neither torch nor Hydra.
"""

from __future__ import annotations

import ctypes
import signal
import sys

DONE, BAD_CONFIG, FAILED, PREEMPTED = 0, 2, 3, 75
STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2)
STOP_FILE = "stop"  # in the run folder: the launcher's way to ask for a stop; `touch RUN/stop` works too


def die_with_parent() -> None:
    """Ask the kernel to kill this process when its parent ends, from now on and however it ends: no orphans."""
    pr_set_pdeathsig = 1
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGKILL)
