"""How ranks agree on what came out of a piece of work that each of them did a part of.

Every function is collective: all ranks of `group` call it (None: the group of all that the training uses). Work that
goes on beside the training has a group of its own, as messages of two threads in one group would get mixed up.
"""

from __future__ import annotations

import os
import shutil
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch.distributed as dist

Group = dist.ProcessGroup | None


class CheckpointError(RuntimeError):
    """A checkpoint could not be saved or used; the message says which, why, and what to do."""


def rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def world_size() -> int:
    return dist.get_world_size() if dist.is_initialized() else 1


def gather(value: Any, group: Group = None) -> list[Any]:
    """Every rank's value, on every rank."""
    values: list[Any] = [value] * world_size()
    if world_size() > 1:
        dist.all_gather_object(values, value, group=group)
    return values


def broadcast(value: Any, group: Group = None) -> Any:
    """Rank 0's value, on every rank."""
    box = [value]
    if world_size() > 1:
        dist.broadcast_object_list(box, src=0, group=group)
    return box[0]


@contextmanager
def agreed(what: str, clean_up: Path | None = None, group: Group = None) -> Iterator[None]:
    """Run the block on every rank; if it failed on one, fail on all with that error, leaving nothing half done."""
    problem, cause = "", None
    try:
        yield
    except (OSError, CheckpointError) as error:
        problem, cause = f"rank {rank()}: {error}", error
    problems = [p for p in gather(problem, group) if p]
    if problems:
        if rank() == 0 and clean_up is not None:
            shutil.rmtree(clean_up, ignore_errors=True)
        gather(None, group)  # only then do the others go on: on a full disk, that room is needed to note the failure
        raise CheckpointError(f"{what} failed on {problems[0]}") from cause


def failpoint(name: str) -> None:
    """For crash tests: die here, as from a power loss, at the n-th passage when DTRAIN_FAILPOINT is "name:n"."""
    wanted, _, count = os.environ.get("DTRAIN_FAILPOINT", "").partition(":")
    if wanted == name:
        os.environ["DTRAIN_FAILPOINT"] = f"{name}:{int(count or 1) - 1}"
        if int(count or 1) <= 1:
            os.kill(os.getpid(), signal.SIGKILL)
