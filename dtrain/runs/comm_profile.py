"""The communication profile of a run: which messages, how long they take, how fast they are, and who waits for whom.

It is made from RUN/profiles/communication-rank-N.json, which the profiled ranks wrote (dtrain/profile/comm.py). A
collective ends for all ranks soon after its last rank has begun it. So the time before that is waiting for that rank,
and the time after it is the message's own. Every file may be missing, damaged or hostile.
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dtrain.runs.folder import read_json
from dtrain.util.format import as_dict, clean, finite, size_text

MOST_RANKS, MOST_CALLS = 256, 5000  # read from one run, and from one rank
# bytes that a rank sends for one byte of the tensor, as a ring does it; by the number of ranks
RING_BYTES: dict[str, Callable[[int], float]] = {
    "all_reduce": lambda n: 2 * (n - 1) / n,
    "all_gather": lambda n: (n - 1) / n,
    "reduce_scatter": lambda n: (n - 1) / n,
    "all_to_all": lambda n: (n - 1) / n,
}


@dataclass(frozen=True)
class Call:
    """One rank's part in a collective; times in µs."""

    kind: str
    size: int
    group: tuple[int, ...]  # empty: not known
    begin: float
    end: float


Meeting = dict[int, Call]  # the calls of one collective, by rank


def profile(run_dir: Path) -> dict[str, Any] | None:
    """Return the profile of a run's recorded steps; None if none of its ranks recorded a collective."""
    ranks, steps, hosts = {}, {}, {}
    for path in sorted((run_dir / "profiles").glob("communication-rank-*.json"))[:MOST_RANKS]:
        content = read_json(path)
        rank, found = finite(content.get("rank")), calls(content)
        if rank is not None and found:
            ranks[int(rank)], hosts[int(rank)] = found, str(content.get("host"))
            steps[int(rank)] = max(1, int(finite(content.get("num_steps")) or 1))
    if not ranks:
        return None
    num_steps = min(steps.values())
    meetings, problem = matched(ranks)
    if len(set(hosts.values())) > 1:
        meetings = aligned(meetings)
    expected = as_dict(read_json(run_dir / "plan.json").get("collectives"))
    return {
        "ranks": sorted(ranks),
        "num_steps": num_steps,
        "messages": messages(ranks, meetings, num_steps, expected),
        "waits": waits(meetings, num_steps),
        "problem": problem,
    }


def calls(content: dict[str, Any]) -> list[Call]:
    """Read one rank's file; rows that are damaged are left out."""
    groups, rows = (value if isinstance(value := content.get(key), list) else [] for key in ("groups", "calls"))
    found = []
    for row in rows[:MOST_CALLS]:
        if not isinstance(row, list) or len(row) != 5:
            continue
        size, group, begin, end = (finite(value) for value in row[1:])
        if size is None or group is None or begin is None or end is None or not 0 <= group < len(groups):
            continue
        members = groups[int(group)] if isinstance(groups[int(group)], list) else []
        ranks = tuple(int(r) for r in members if finite(r) is not None)
        found.append(Call(clean(str(row[0]))[:40], int(size), ranks, begin, end))
    return found


def matched(ranks: dict[int, list[Call]]) -> tuple[list[Meeting], str]:
    """Put the calls of one collective together: the n-th of a group on each of its ranks. Else say why not."""
    if len(ranks) == 1:
        return [], "one rank is profiled; profile.ranks=null profiles all, and shows who waits for whom"
    sequences: dict[tuple[int, ...], dict[int, list[Call]]] = defaultdict(dict)
    for rank, found in ranks.items():
        for call in found:
            if len(call.group) > 1 and call.kind in RING_BYTES:
                sequences[call.group].setdefault(rank, []).append(call)
    meetings: list[Meeting] = []
    for group, by_rank in sequences.items():
        if set(by_rank) != set(group):
            continue  # not all of its ranks are profiled
        alike = {tuple((call.kind, call.size) for call in found) for found in by_rank.values()}
        if len(alike) == 1:
            meetings += [dict(zip(by_rank, one, strict=True)) for one in zip(*by_rank.values(), strict=True)]
    why = "gloo does not say which ranks take part, or not all of them are profiled"
    return meetings, "" if meetings else f"the collectives of the ranks cannot be compared: {why}"


def aligned(meetings: list[Meeting]) -> list[Meeting]:
    """Shift each rank's clock so that collectives end at the same time as on the others: hosts' clocks differ."""
    late: dict[int, list[float]] = defaultdict(list)
    for meeting in meetings:
        middle = statistics.median(call.end for call in meeting.values())
        for rank, call in meeting.items():
            late[rank].append(call.end - middle)
    shift = {rank: statistics.median(found) for rank, found in late.items()}
    return [
        {r: Call(c.kind, c.size, c.group, c.begin - shift[r], c.end - shift[r]) for r, c in meeting.items()}
        for meeting in meetings
    ]


def messages(
    ranks: dict[int, list[Call]], meetings: list[Meeting], num_steps: int, expected: dict[str, Any]
) -> list[dict[str, Any]]:
    """One row for each kind and size, the longest in all first. Times are means over ranks and steps."""
    durations: dict[tuple[str, int, int], list[float]] = defaultdict(list)
    for found in ranks.values():
        for call in found:
            durations[call.kind, call.size, len(call.group)].append(call.end - call.begin)
    own: dict[tuple[str, int, int], list[float]] = defaultdict(list)
    for meeting in meetings:
        call = next(iter(meeting.values()))
        last = max(c.begin for c in meeting.values())
        own[call.kind, call.size, len(call.group)].append(max(c.end for c in meeting.values()) - last)
    rows = []
    for (kind, size, members), times in durations.items():
        key = (kind, size, members)
        # without the other ranks, a call may include waiting: its shortest time is nearest to its own
        message_us = statistics.median(own[key]) if key in own else min(times)
        factor = RING_BYTES[kind](members) if kind in RING_BYTES and members > 1 else 1.0
        rows.append(
            {
                "kind": kind, "bytes": size, "ranks": members or None,
                "per_step": round(len(times) / len(ranks) / num_steps, 3),
                "ms_per_step": round(sum(times) / len(ranks) / num_steps / 1000, 4),
                "own_ms": round(message_us / 1000, 4),
                "bus_gb_s": round(factor * size / message_us / 1000, 4) if message_us > 0 else None,
                "expected_gb_s": expected_rate(as_dict(expected.get(kind)), members, factor * size),
            }
        )  # fmt: skip
    return sorted(rows, key=lambda row: -row["ms_per_step"])


def expected_rate(line: dict[str, Any], members: int, num_bytes: float) -> float | None:
    """GB/s that the hardware file expects of a message between all ranks, with its latency."""
    latency, rate = finite(line.get("latency_us")), finite(line.get("bus_gb_s"))
    if latency is None or not rate or num_bytes <= 0 or finite(line.get("ranks")) != members:
        return None
    return round(num_bytes / (latency + num_bytes / rate / 1000) / 1000, 4)


def waits(meetings: list[Meeting], num_steps: int) -> list[dict[str, Any]]:
    """Return how long each rank waits in a collective for the last one to begin it, per step; the longest first."""
    found: dict[tuple[int, int], list[float]] = defaultdict(list)
    for meeting in meetings:
        last = max(meeting, key=lambda rank: meeting[rank].begin)
        for rank, call in meeting.items():
            if rank != last:
                found[rank, last].append(min(meeting[last].begin, call.end) - call.begin)
    rows = [
        {
            "rank": rank, "for": last, "ms_per_step": round(sum(times) / num_steps / 1000, 4),
            "calls": len(times), "of": len(meetings),
        }
        for (rank, last), times in found.items()
    ]  # fmt: skip
    return sorted(rows, key=lambda row: -row["ms_per_step"])


# ---- for people ----------------------------------------------------------------------------------------------

HEADS = ("collective", "size", "ranks", "calls", "ms", "own ms", "GB/s", "expected")
HINT = "calls and ms: of a step, with waiting; own ms: of one message, after its last rank began; GB/s: bus bandwidth"


def cells(message: dict[str, Any]) -> list[str]:
    """One row of the table of messages, under HEADS."""
    rates = [f"{rate:.3g}" if (rate := message[key]) else "-" for key in ("bus_gb_s", "expected_gb_s")]
    times = [f"{message[key]:.2f}" for key in ("ms_per_step", "own_ms")]
    return [
        message["kind"], size_text(message["bytes"]), str(message["ranks"] or "-"), f"{message['per_step']:.3g}",
        *times, *rates,
    ]  # fmt: skip


def wait_text(wait: dict[str, Any]) -> str:
    times = f"{wait['ms_per_step']:.2f} ms a step"
    return f"rank {wait['rank']} waits for rank {wait['for']}: {times}, in {wait['calls']} of {wait['of']} collectives"
