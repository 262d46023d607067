"""What the launcher and the ranks agree on: exit codes, how a stop is asked for, how small files are written.

Both sides import this file, so it imports neither torch nor Hydra.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

DONE, BAD_CONFIG, FAILED, PREEMPTED = 0, 2, 3, 75
STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2)
STOP_FILE = "stop"  # in the run folder: the launcher's way to ask for a stop; `touch RUN/stop` works too


def die_with_parent() -> None:
    """Ask the kernel to kill this process when its parent ends, however it ends: no orphans."""
    pr_set_pdeathsig = 1
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGKILL)


def write_json(path: Path, values: dict[str, Any]) -> None:
    """Write a small JSON file so that a reader sees the old one or the new one, never half."""
    temporary = path.with_name(f".{path.name}.tmp")
    temporary.write_text(json.dumps(values, indent=1) + "\n")
    os.replace(temporary, path)


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file; empty when the file is missing or broken."""
    try:
        values = json.loads(path.read_text())
    except (OSError, ValueError):
        return {}
    return values if isinstance(values, dict) else {}
