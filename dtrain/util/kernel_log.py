"""What the kernel logged about memory, disks and GPUs while a run was alive: evidence for `dtrain why`."""

from __future__ import annotations

import os
import re
import time

# processes killed for memory, GPU errors, disks and file servers that fail, memory and CPU errors
WORTH = re.compile(
    r"Killed process \d+|NVRM: Xid|I/O error|(EXT4|XFS|BTRFS)\S* (error|.*shut ?down)|nfs: server .* not responding"
    r"|Hardware Error|Machine check|segfault at|traps: ",
    re.I,
)
MOST = 20  # newest lines that are kept


def now() -> float:
    """Seconds on the clock that stamps the kernel's messages."""
    return time.clock_gettime(time.CLOCK_MONOTONIC)


def since(began: float) -> list[str]:
    """The lines worth reading since `began`; [] if the log may not be read, as in most containers."""
    try:
        handle = os.open("/dev/kmsg", os.O_RDONLY | os.O_NONBLOCK)
    except OSError:
        return []
    found: list[str] = []
    try:
        while True:
            try:
                record = os.read(handle, 8192).decode(errors="replace")  # priority,number,microseconds,flags;text
            except BrokenPipeError:  # this record was overwritten while we read
                continue
            head, _, text = record.partition(";")
            stamp = head.split(",")[2:3]
            if stamp and int(stamp[0]) / 1e6 >= began - 1 and WORTH.search(text):
                found.append(text.splitlines()[0])
    except (OSError, ValueError):  # the end of the log, or a format that we do not know
        pass
    finally:
        os.close(handle)
    return found[-MOST:]
