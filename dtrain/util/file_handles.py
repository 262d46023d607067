"""File handles: every rank holds a connection to every other, so the usual limit of 1,024 is hit near 300 ranks.

The usual limit is the soft one, which a process may raise up to the hard one. So ranks raise it, and only the hard
limit is checked.
"""

from __future__ import annotations

import resource

from dtrain.errors import bad

# Counted at 2 to 24 ranks: 16 + 2 N (two sockets per peer: gloo for training, gloo for background saves), and 25 + 3 N
# in rank 0 under srun, where it hosts the store. 40 are left for the run's own files and loaders.
PER_RANK, ALWAYS = 3, 64
MOST = 1 << 16  # bounded: some programs close every possible handle, one by one
FIX = "ulimit -Hn {needed} as root, LimitNOFILE={needed} for slurmd, or docker run --ulimit nofile={needed}"


def needed(world_size: int) -> int:
    """File handles that a rank of this world may hold."""
    return ALWAYS + PER_RANK * world_size


def hard_limit() -> int | None:
    """The maximum to which this process may raise its limit; None: unlimited."""
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    return None if hard == resource.RLIM_INFINITY else hard


def raise_limit() -> None:
    """Raise the soft limit to the hard limit, for this process and its children."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = min(MOST, hard_limit() or MOST)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def problem(world_size: int) -> str:
    """Explain why this machine's hard limit is too low for a rank of this world, or return ""."""
    limit = hard_limit()
    if limit is None or limit >= needed(world_size):
        return ""
    return f"a rank of {world_size} needs {needed(world_size)} file handles, and the hard limit is {limit} (ulimit -Hn)"


def check(setting: str, value: int, world_size: int) -> None:
    """Reject a world on this machine that would fail with "too many open files"."""
    if why := problem(world_size):
        raise bad(setting, value, why, FIX.format(needed=needed(world_size)))
