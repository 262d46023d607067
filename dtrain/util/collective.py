"""Collective operations by which ranks agree on the result of work that they share.

Every function is collective: all ranks of `group` call it (None: the default group, which training uses). Background
work needs its own group, because collectives of two threads in one group would get mixed up.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import signal
import socket
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

from dtrain.errors import CheckpointError as CheckpointError
from dtrain.errors import bad

Group = dist.ProcessGroup | None


def rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def world_size() -> int:
    return dist.get_world_size() if dist.is_initialized() else 1


class Alone(TorchDispatchMode):
    """Fails a collective at once: this rank looks at an error again, and its peers would not take part."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if "c10d" in func.namespace:
            raise RuntimeError(f"{func} needs all ranks, and one of them tries something alone")
        return func(*args, **(kwargs or {}))


def wait_for_peers(works: Iterable[Any]) -> None:
    """Wait for sends and receives. No recorder has gloo's: the hang watch knows them by the name of this function."""
    for work in works:
        work.wait()


def sendable(values: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """Return the values where the group can send them from: gloo cannot send from a GPU."""
    return values.cpu() if values.is_cuda and dist.get_backend(group) == "gloo" else values


def gather(value: Any, group: Group = None) -> list[Any]:
    """Return every rank's value, on every rank."""
    values: list[Any] = [value] * world_size()
    if world_size() > 1:
        dist.all_gather_object(values, value, group=group)
    return values


def broadcast(value: Any, group: Group = None) -> Any:
    """Return rank 0's value, on every rank."""
    box = [value]
    if world_size() > 1:
        dist.broadcast_object_list(box, src=0, group=group)
    return box[0]


def all_problems(problem: str, group: Group = None) -> list[str]:
    """Return every rank's problem, on every rank. If no rank has one, this is a single small all-reduce."""
    found = torch.tensor([bool(problem)], dtype=torch.int32)
    if world_size() > 1:
        dist.all_reduce(found, dist.ReduceOp.MAX, group=group)
    return [p for p in gather(problem, group) if p] if found.item() else []


def from_rank_0(ask: Callable[[], Any], what: str, group: Group = None) -> Any:
    """Run `ask` on rank 0 and broadcast its result; its error is raised on all ranks.

    For file system access: a network file system caches for seconds that a path does not exist. A rank that looks too
    early would not see what another rank creates a moment later.
    """
    answer, problem, cause = None, "", None
    if rank() == 0:
        try:
            answer = ask()
        except (OSError, CheckpointError) as error:
            problem, cause = f"{what} failed on rank 0: {error}", error
    answer, problem = broadcast((answer, problem), group)
    if problem:
        raise CheckpointError(problem) from cause
    return answer


def exchange(parcels: Mapping[int, Any], group: Group = None) -> dict[int, Any]:
    """Send a JSON value to some ranks; return what arrived, by sender. Each rank handles only its own share."""
    if world_size() == 1:
        return {0: json.loads(json.dumps(parcels[0]))} if 0 in parcels else {}
    texts = [json.dumps(parcels[r]).encode() if r in parcels else b"" for r in range(world_size())]
    out_sizes = torch.tensor([len(text) for text in texts])
    in_sizes = torch.empty_like(out_sizes)
    dist.all_to_all_single(in_sizes, out_sizes, group=group)
    sent = torch.frombuffer(bytearray(b"".join(texts)) or bytearray(1), dtype=torch.uint8)[: int(out_sizes.sum())]
    received = torch.empty(int(in_sizes.sum()), dtype=torch.uint8)
    dist.all_to_all_single(received, sent, in_sizes.tolist(), out_sizes.tolist(), group=group)
    parts = received.split(in_sizes.tolist())
    return {r: json.loads(bytes(part.numpy())) for r, part in enumerate(parts) if len(part)}


def collect(value: Any, group: Group = None) -> list[Any]:
    """Return every rank's JSON value on rank 0; nothing on the other ranks."""
    if world_size() == 1:
        return [json.loads(json.dumps(value))]
    text = json.dumps(value).encode()
    longest = torch.tensor([len(text)])
    dist.all_reduce(longest, dist.ReduceOp.MAX, group=group)
    sent = torch.frombuffer(bytearray(text.ljust(int(longest))), dtype=torch.uint8)  # JSON may end in spaces
    received = [torch.empty_like(sent) for _ in range(world_size())] if rank() == 0 else None
    dist.gather(sent, received, dst=0, group=group)
    return [json.loads(bytes(part.numpy())) for part in received or []]


def distinct(value: Any, group: Group = None) -> list[Any]:
    """Return the distinct JSON values of all ranks, on every rank.

    In most layouts all ranks have the same value, or one per pipeline stage: each rank sends only a hash.
    """
    if world_size() == 1:
        return [value]
    digest = hashlib.sha256(json.dumps(value, sort_keys=True).encode()).digest()
    own = torch.frombuffer(bytearray(digest), dtype=torch.uint8)
    hashes = [torch.empty_like(own) for _ in range(world_size())]
    dist.all_gather(hashes, own, group=group)
    all_hashes = [bytes(h.numpy()) for h in hashes]
    is_first = all_hashes.index(digest) == rank()
    received = exchange({0: value} if is_first else {}, group)
    return list(broadcast(list(received.values()), group))


def require_same(facts: dict[str, tuple[str, str]]) -> None:
    """Reject a run whose ranks do not start from the same facts: setting or name → (this rank's value, the fix).

    One small all-reduce compares hashes, for any number of ranks; the ranks exchange the values only if they differ.
    """
    hashes = [int.from_bytes(hashlib.sha256(value.encode()).digest()[:7]) for value, _ in facts.values()]
    extremes = torch.tensor([*hashes, *(-h for h in hashes)])
    if world_size() > 1:
        dist.all_reduce(extremes, dist.ReduceOp.MAX)
    largest, smallest = extremes[: len(hashes)], -extremes[len(hashes) :]
    if torch.equal(largest, smallest):
        return
    everywhere = gather((socket.gethostname(), {name: value for name, (value, _) in facts.items()}))
    for name, (_, fix) in facts.items():
        values = [mine[name] for _, mine in everywhere]
        usual = max(values, key=values.count)
        other = next((r for r, value in enumerate(values) if value != usual), None)
        if other is not None:
            host, first = everywhere[other][0], values.index(usual)
            rule = f"rank {other} ({host}) has {values[other]}, and rank {first} ({everywhere[first][0]}) has {usual}"
            raise bad(name, "…", f"must be the same on all ranks: {rule}", fix.format(host=host))


@contextmanager
def agreed(what: str, clean_up: Path | None = None, group: Group = None) -> Iterator[None]:
    """Run the block on every rank; if one rank fails, all raise its error and nothing half-done remains."""
    problem, cause = "", None
    try:
        yield
    except (OSError, CheckpointError) as error:
        problem, cause = f"rank {rank()}: {error}", error
    problems = all_problems(problem, group)
    if problems:
        if rank() == 0 and clean_up is not None:
            shutil.rmtree(clean_up, ignore_errors=True)
        gather(None, group)  # wait for the cleanup: on a full disk its space is needed for the failure note
        raise CheckpointError(f"{what} failed on {problems[0]}") from cause


def failpoint(name: str) -> None:
    """For crash tests: kill this process, as in a power loss, at the n-th call if DTRAIN_FAILPOINT is "name:n"."""
    wanted, _, count = os.environ.get("DTRAIN_FAILPOINT", "").partition(":")
    if wanted == name:
        os.environ["DTRAIN_FAILPOINT"] = f"{name}:{int(count or 1) - 1}"
        if int(count or 1) <= 1:
            os.kill(os.getpid(), signal.SIGKILL)
