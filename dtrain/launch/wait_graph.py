"""Who holds up a run that stands still: the graph of which rank waits for which, from the collectives of each.

A rank with an open collective waits for the members of its group that have not begun it. The ranks that others wait
for, and that wait for nobody themselves, hold up the run.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

from dtrain.runs.causes import is_users_file

CONTEXTS = (1, 2, 3)  # numbers of earlier collectives that are compared, too
OFTEN = 2
Position = dict[str, Any]  # what a rank wrote about itself (train/position.py); {}: nothing


def culprits(positions: dict[int, Position]) -> tuple[list[int], bool]:
    """The ranks that hold up the others, by the first rule that tells some ranks from the rest; [] if none does.

    Also returns whether they called another collective than the rest.
    """
    if len(positions) == 1:
        return list(positions), False
    rules: list[Callable[[dict[int, Position]], list[int]]] = [not_started, not_running, silent, awaited, different]
    for rule in [*rules, elsewhere, behind, not_waiting, calling]:
        if 0 < len(ranks := rule(positions)) < len(positions):
            return sorted(ranks), rule in (different, elsewhere, calling)
    return [], False


def not_started(positions: dict[int, Position]) -> list[int]:
    return [rank for rank, position in positions.items() if not position]


def not_running(positions: dict[int, Position]) -> list[int]:
    return [rank for rank, position in positions.items() if position.get("process") in ("ended", "stopped")]


def silent(positions: dict[int, Position]) -> list[int]:
    """The ranks whose thread could not write."""
    return [rank for rank, position in positions.items() if "threads" not in position]


def not_waiting(positions: dict[int, Position]) -> list[int]:
    return [rank for rank, position in positions.items() if not is_waiting(position)]


def calling(positions: dict[int, Position]) -> list[int]:
    return [rank for rank, position in positions.items() if calls_itself(position)]


def awaited(positions: dict[int, Position]) -> list[int]:
    """The ranks that others wait for and that wait for nobody."""
    waits_for = wait_graph(positions)
    found = set().union(*waits_for.values())
    return [rank for rank in found if not waits_for[rank] and not is_blocked(positions[rank])]


def elsewhere(positions: dict[int, Position]) -> list[int]:
    """The one rank that waits for a send or receive while all others wait for it in a collective."""
    waits_for = wait_graph(positions)
    rest = [rank for rank, peers in waits_for.items() if not peers]
    is_alone = len(rest) == 1 and all(rest == list(peers) for rank, peers in waits_for.items() if rank != rest[0])
    return rest if is_alone and len(positions) > 2 and is_blocked(positions[rest[0]]) else []


def wait_graph(positions: dict[int, Position]) -> dict[int, set[int]]:
    """For each rank, the members of its groups that have not begun the collective in which it waits."""
    waits_for: dict[int, set[int]] = {rank: set() for rank in positions}
    late: dict[tuple[str, int], set[int]] = {}  # the members of a group that have not begun a collective
    for rank, position in positions.items():
        for name, group in position.get("groups", {}).items():
            newest = max((one["seq"] for one in group["open"]), default=0)
            if (name, newest) not in late:
                members = [peer for peer in group["ranks"] if "groups" in positions.get(peer, {})]
                late[name, newest] = {peer for peer in members if begun(positions[peer], name) < newest}
            waits_for[rank] |= late[name, newest]
    return waits_for


def begun(position: Position, group: str) -> int:
    """The number of collectives of the group that the rank has begun; a group without any is not listed."""
    return int(position["groups"].get(group, {}).get("begun", 0))


def different(positions: dict[int, Position]) -> list[int]:
    """The ranks that called another collective than the rest of the group did in its place."""
    return first_difference(positions)[0]


def first_difference(positions: dict[int, Position]) -> tuple[list[int], dict[int, str]]:
    """The ranks that differ from most members of the group in the first place where any do, and what each rank called.

    Without a majority: the ranks that never called this collective after the ones before it, as a training loop repeats
    the same calls; then the ranks whose user's code called it.
    """
    calls: dict[tuple[int, str], dict[int, str]] = {}
    for rank, position in positions.items():
        for name, group in position.get("groups", {}).items():
            for seq, call in group.get("calls", []):
                calls.setdefault((seq, f"{name} {group['ranks']}"), {})[rank] = call
    for (seq, name), called in sorted(calls.items()):
        usual, times = Counter(called.values()).most_common(1)[0]
        if times == len(called):
            continue
        if len(called) < 2 * times:
            return [rank for rank, call in called.items() if call != usual], called
        groups = {rank: positions[rank]["groups"][name.partition(" [")[0]] for rank in called}
        own = [rank for rank in called if calls_itself(positions[rank])]
        return new_ones(groups, seq) or (own if len(own) < len(called) else []), called
    return [], {}


def new_ones(groups: dict[int, dict[str, Any]], seq: int) -> list[int]:
    """The ranks whose collective never followed on those before it, if that of all others did so several times."""
    for before in CONTEXTS:
        times = {rank: num_times(group, seq, before) for rank, group in groups.items()}
        new = [rank for rank, count in times.items() if count == 0]
        if new and all(count >= OFTEN for rank, count in times.items() if rank not in new):
            return new if len(new) < len(groups) else []
    return []


def num_times(group: dict[str, Any], seq: int, before: int) -> int:
    """How often did an earlier collective of the group follow on as many before it as this one does?"""
    calls = dict(group["calls"])

    def context(last: int) -> list[str | None]:
        return [calls.get(i) for i in range(last - before, last + 1)]

    return sum(context(i) == context(seq) for i in calls if i < seq)


def behind(positions: dict[int, Position]) -> list[int]:
    """The ranks that have made the fewest moves through the loop."""
    moves = {rank: position.get("moves", -1) for rank, position in positions.items()}
    return [rank for rank, count in moves.items() if count == min(moves.values())]


def is_waiting(position: Position) -> bool:
    return bool(open_collectives(position)) or is_blocked(position)


def is_blocked(position: Position) -> bool:
    """Does the main thread wait inside of torch.distributed? gloo's send and recv show there only."""
    own = "in wait_for_peers"  # dtrain/util/collective.py
    return any("/torch/distributed/" in line or line.endswith(own) for line in main_stack(position)[:1])


def calls_itself(position: Position) -> bool:
    """Does the user's code call the collective in which the rank waits?"""
    stack = [path_of(line) for line in main_stack(position)]
    callers = [path for path in stack if not path.endswith(("distributed_c10d.py", "c10d_logger.py"))]
    return bool(callers) and stack[0] != callers[0] and is_users_file(callers[0])


def open_collectives(position: Position) -> list[dict[str, Any]]:
    return [one for group in position.get("groups", {}).values() for one in group["open"]]


def path_of(line: str) -> str:
    return line.partition(":")[0]


def main_stack(position: Position) -> list[str]:
    return list(position.get("threads", {}).get("MainThread") or position.get("printed") or [])
