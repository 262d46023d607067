"""Time collectives: the one clock of `dtrain comm bench`, preflight=full and `dtrain plan calibrate`.

Calls run one after another, as in training. A time is that of the slowest rank: its median over the calls (p50), and
its slowest hundredth (p99). All ranks of a group must call a function here; what they decide, they decide together.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist

from dtrain.runs.comm_profile import RING_BYTES
from dtrain.util.device_rates import synchronize, timed

MIB = 2**20
MOST_CALLS = 1000
PARTS, LEAST_PART = 8, 20
Group = Any  # torch's process group type is partly private
Agree = Callable[[Sequence[float]], list[float]]  # the largest of each number over the ranks that measure
# bus bytes per message byte, by the number of ranks (nccl-tests, doc/PERFORMANCE.md)
BUS: dict[str, Callable[[int], float]] = {**RING_BYTES, "broadcast": lambda n: 1.0, "send_recv": lambda n: 1.0}


@dataclass(frozen=True)
class Timing:
    """One collective at one size: seconds of a call, and how many were timed."""

    kind: str
    num_bytes: int  # of the whole tensor, as a rank has it before or after; of send_recv: what is sent
    ranks: int
    p50: float
    p99: float
    calls: int
    spent: float  # seconds of the whole measurement

    @property
    def algorithm_gb_s(self) -> float:
        """Bytes of the message per second."""
        return self.num_bytes / self.p50 / 1e9

    @property
    def bus_gb_s(self) -> float:
        """Bytes over the busiest link per second: comparable between collectives, and with the link's own rate."""
        return BUS[self.kind](self.ranks) * self.algorithm_gb_s


def measure(
    kind: str, num_bytes: int, group: Group, agree: Agree, device: torch.device, budget_s: float, most: int = MOST_CALLS
) -> Timing:
    """Time one collective at one size for about this long."""
    return timing(collective(kind, num_bytes, group, device), kind, num_bytes, group, agree, device, budget_s, most)


def timing(
    step: Callable[[], object], kind: str, num_bytes: int, group: Group, agree: Agree, device: torch.device,
    budget_s: float, most: int = MOST_CALLS,
) -> Timing:  # fmt: skip
    """Time a step that sends `num_bytes` by this kind of collective."""
    began = time.perf_counter()
    step()  # the first call opens connections
    [once] = agree([max(1e-7, timed(step, device, 1))])
    calls, spent = max(1, min(most, int(budget_s / once))), 0.0
    part = max(min(calls, LEAST_PART), -(-calls // PARTS))
    times: list[float] = []
    while len(times) < calls and spent < budget_s:  # in parts: on a busy host, one call says little about the next
        times += call_times(step, device, part)
        [spent] = agree([time.perf_counter() - began])
    p50, p99 = agree([statistics.median(times), quantile(times, 0.99)])
    return Timing(kind, num_bytes, dist.get_world_size(group), p50, p99, len(times), spent)


def sweep(
    kind: str, sizes: Sequence[int], group: Group, agree: Agree, device: torch.device, budget_s: float,
    most: int = MOST_CALLS,
) -> list[Timing]:  # fmt: skip
    """Time a collective by size, from small to large, as far as one call fits the budget: a slow link must not hang."""
    found: list[Timing] = []
    for size in sizes:
        spent = sum(timing.spent for timing in found)
        if found and (found[-1].p50 * size / found[-1].num_bytes > budget_s or spent > 2 * budget_s * len(sizes)):
            break
        found.append(measure(kind, size, group, agree, device, budget_s, most))
    return found


def call_times(step: Callable[[], object], device: torch.device, calls: int) -> list[float]:
    """Seconds of each call: between events on a GPU, otherwise by the host's clock."""
    synchronize(device)
    if device.type != "cuda":
        marks = [time.perf_counter()]
        for _ in range(calls):
            step()
            marks.append(time.perf_counter())
        return [after - before for before, after in pairwise(marks)]
    events = [torch.cuda.Event(enable_timing=True) for _ in range(calls + 1)]
    events[0].record()
    for event in events[1:]:
        step()
        event.record()
    torch.cuda.synchronize(device)
    return [before.elapsed_time(after) / 1e3 for before, after in pairwise(events)]


def quantile(values: Sequence[float], share: float) -> float:
    """The smallest value that at least this share of the values does not exceed."""
    ordered = sorted(values)
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)]


def collective(kind: str, num_bytes: int, group: Group, device: torch.device) -> Callable[[], object]:
    """Return one collective over messages of this size, ready to be called repeatedly."""
    size = dist.get_world_size(group)
    whole = torch.zeros(max(1, num_bytes // 4 // size) * size, device=device)
    if kind == "all_reduce":
        return lambda: dist.all_reduce(whole, group=group)
    if kind == "broadcast":
        return lambda: dist.broadcast(whole, group=group, group_src=0)
    if kind == "all_to_all":
        received = torch.empty_like(whole)
        return lambda: dist.all_to_all_single(received, whole, group=group)
    if kind == "send_recv":
        me = dist.get_rank(group)
        return exchange(torch.zeros(max(1, num_bytes // 4), device=device), group, (me + 1) % size, (me - 1) % size)
    part = torch.zeros(whole.numel() // size, device=device)
    if kind == "all_gather":
        return lambda: dist.all_gather_into_tensor(whole, part, group=group)
    return lambda: dist.reduce_scatter_tensor(part, whole, group=group)


def exchange(sent: torch.Tensor, group: Group, to: int | None, source: int | None) -> Callable[[], object]:
    """Send to one rank of the group and receive from another at the same time; None: only the other of the two."""
    received = torch.empty_like(sent)

    def step() -> None:
        operations = [] if to is None else [dist.P2POp(dist.isend, sent, group=group, group_peer=to)]
        operations += [] if source is None else [dist.P2POp(dist.irecv, received, group=group, group_peer=source)]
        for work in dist.batch_isend_irecv(operations):
            work.wait()

    return step


def one_way(
    num_bytes: int, group: Group, control: Group, device: torch.device, sender: int, receiver: int, budget_s: float
) -> Timing:
    """Time sends in one direction between two ranks; both call it. `control`: a CPU group of the same ranks."""
    me, empty = dist.get_rank(group), torch.zeros(max(1, num_bytes // 4), device=device)
    is_sender = me == sender
    step = exchange(empty, group, receiver if is_sender else None, None if is_sender else sender)
    agree = slowest_of_two(control, receiver if is_sender else sender)
    return timing(step, "send_recv", num_bytes, group, agree, device, budget_s)


# ---- agreeing ------------------------------------------------------------------------------------------------


def slowest_of(control: Group) -> Agree:
    """The largest of each number over a CPU group, so that all its ranks take the same branches."""

    def agree(values: Sequence[float]) -> list[float]:
        numbers = torch.tensor(values, dtype=torch.float64)
        dist.all_reduce(numbers, dist.ReduceOp.MAX, group=control)
        return [float(n) for n in numbers]

    return agree


def slowest_of_two(control: Group, peer: int) -> Agree:
    """The larger of each number of this rank and one other: no group of two is needed."""

    def agree(values: Sequence[float]) -> list[float]:
        mine = torch.tensor(values, dtype=torch.float64)
        theirs = torch.empty_like(mine)
        works = [
            dist.P2POp(dist.isend, mine, group=control, group_peer=peer),
            dist.P2POp(dist.irecv, theirs, group=control, group_peer=peer),
        ]
        for work in dist.batch_isend_irecv(works):
            work.wait()
        return [float(n) for n in torch.maximum(mine, theirs)]

    return agree


def rounds(places: Sequence[Any]) -> list[list[tuple[Any, Any]]]:
    """Every pair once, in rounds of disjoint pairs: everyone meets someone else in each (round robin)."""
    circle: list[Any] = [*places, *([None] if len(places) % 2 else [])]
    made = []
    for _ in range(len(circle) - 1):
        half = len(circle) // 2
        pairs = zip(circle[:half], reversed(circle[half:]), strict=True)
        made.append([(a, b) for a, b in pairs if a is not None and b is not None])
        circle = [circle[0], circle[-1], *circle[1:-1]]
    return made
