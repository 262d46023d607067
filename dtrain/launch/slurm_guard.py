"""Requeues an elastic job whose first node is lost: runs on other nodes of the allocation, as long as the job does.

With --no-kill SLURM keeps an allocation that lost a node. If that was the node of the batch script, nothing is left to
continue the run, and the job would wait for its time limit. SLURM's own commands are all that this needs.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time

from dtrain.runs.protocol import POSITION_FILE

LOOK_S = 10.0
SETTLE_S = 5.0  # until SLURM shows that a job ends or is requeued, if that is why this step is ended


def is_lost(job: str, node: str = "") -> bool:
    """Has SLURM removed the node of the batch script from the allocation? job: `scontrol show job`.

    node: this node, if its step was cancelled. If the job runs on, and this node is still in it, then the sruns of the
    batch script have ended, because their node is going down.
    """
    host, listed = re.search(r"\bBatchHost=(\S+)", job), re.search(r"\sNodeList=(\S+)", job)
    if not (host and listed and "JobState=RUNNING" in job):
        return False
    nodes = ask("scontrol", "show", "hostnames", listed[1]).split()
    return bool(nodes) and (host[1] not in nodes or node in nodes)


def ask(*command: str) -> str:
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return ""  # the controller is unavailable: ask again later


def written(run_dir: str) -> int:
    """When rank 0, which is on the first node, wrote its position: it does so once a second."""
    try:
        return os.stat(os.path.join(run_dir, POSITION_FILE.format(0))).st_mtime_ns
    except OSError:
        return 0


def main() -> None:
    for number in (signal.SIGUSR1, signal.SIGUSR2):  # stop requests to the ranks reach all steps of the job
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    array, task = os.environ.get("SLURM_ARRAY_JOB_ID"), os.environ.get("SLURM_ARRAY_TASK_ID")
    job = f"{array}_{task}" if array else os.environ["SLURM_JOB_ID"]
    while True:
        cancelled = signal.sigtimedwait({signal.SIGTERM}, LOOK_S) is not None  # SLURM's KillWait is left
        if cancelled:
            before = written(sys.argv[1])
            time.sleep(SETTLE_S)
            if written(sys.argv[1]) != before:
                return  # the first node is alive: all steps were asked to end, as before a preemption
        node = os.environ.get("SLURMD_NODENAME", "") if cancelled else ""
        if is_lost(ask("scontrol", "show", "job", job), node):
            ask("scontrol", "requeue", job)
        if cancelled:
            return


if __name__ == "__main__":
    main()
