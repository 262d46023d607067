"""Which rank writes which part of a checkpoint, decided once per layout and cached.

Several ranks may hold the same part of a tensor; one of them writes it, and the work is balanced. No rank sees what all
ranks hold, which is O(tensors × ranks): 2.2 million parts for llama-70b on 1,024 ranks. Instead each tensor name has a
referee, a rank selected by the name's hash. Every rank reports its parts to their referees and learns how many others
hold each part. Ranks that hold the same parts then compute the same division without another collective.

Each step below is a pure function of its inputs, so that benchmarks/checkpoint_ranks.py can run it for thousands of
ranks in one process.
"""

from __future__ import annotations

import hashlib
import json
import math
import zlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist

from dtrain.checkpoint import layouts
from dtrain.checkpoint.layouts import Ints
from dtrain.util.collective import CheckpointError, agreed, broadcast, exchange, rank, world_size

Part = tuple[str, Ints, Ints]  # name, offset, shape
Entry = tuple[str, Ints, Ints, Ints, str]  # and the shape of the whole tensor, its dtype


class Writers:
    """Decides which parts this rank writes. All ranks have one and call it together."""

    def __init__(self) -> None:
        self.entries: list[Entry] | None = None
        self.mine: set[Part] = set()
        self.index: dict[str, Any] = {}  # on rank 0, for the manifest: tensors and layouts

    def choose(self, entries: list[Entry]) -> set[Part]:
        """Return the parts that this rank writes, out of those that it holds."""
        changed = torch.tensor([entries != self.entries], dtype=torch.int32)
        if world_size() > 1:
            dist.all_reduce(changed, dist.ReduceOp.MAX)
        if changed.item():
            self.mine, self.index = plan(entries)
            self.entries = entries
        return self.mine


def plan(entries: list[Entry]) -> tuple[set[Part], dict[str, Any]]:
    """Return what this rank writes, and on rank 0 the index of the whole checkpoint. Collective."""
    size = world_size()
    received = exchange(reports(entries, size))
    answers: dict[int, Any] = {}
    with agreed("planning a checkpoint"):
        answers = judge(received)
    mine = divide(entries, size, exchange(answers))
    confirmed = exchange(by_referee(mine, size))
    tensors: dict[str, Any] = {}
    described: dict[str, Any] = {}
    with agreed("planning a checkpoint"):
        tensors, described = describe(received, confirmed)
    of_all = exchange({0: tensors})
    wanted = broadcast({key: r for r, part in of_all.items() for _, _, key in part.values()} if rank() == 0 else None)
    sent = exchange({0: {key: described[key] for key, r in wanted.items() if r == rank()}})
    return mine, index(of_all.values(), sent.values()) if rank() == 0 else {}


def referee(name: str, size: int) -> int:
    return zlib.crc32(name.encode()) % size


def reports(entries: Iterable[Entry], size: int) -> dict[int, list[Any]]:
    """Return the report to each referee: what this rank holds of the referee's tensors."""
    to: dict[int, list[Any]] = {}
    for entry in entries:
        to.setdefault(referee(entry[0], size), []).append(entry)
    return to


def judge(received: Mapping[int, Sequence[Any]]) -> dict[int, list[Any]]:
    """Return a referee's answers per rank: each part's group of holders, their number, and the rank's index."""
    holders: dict[Part, list[int]] = {}
    whole: dict[str, Any] = {}
    for r in sorted(received):
        for name, offset, shape, *kind in received[r]:
            if whole.setdefault(name, kind) != kind:
                raise CheckpointError(f"{name} has {whole[name]} on one rank and {kind} on rank {r}")
            holders.setdefault((name, tuple(offset), tuple(shape)), []).append(r)
    groups = {part: hashlib.sha256(json.dumps(ranks).encode()).hexdigest()[:16] for part, ranks in holders.items()}
    places = {part: {r: i for i, r in enumerate(ranks)} for part, ranks in holders.items()}
    answers: dict[int, list[Any]] = {}
    for r, entries in received.items():
        for name, offset, shape, *_ in entries:
            part = (name, tuple(offset), tuple(shape))
            answers.setdefault(r, []).append([groups[part], len(places[part]), places[part][r]])
    return answers


def divide(entries: Sequence[Entry], size: int, answers: Mapping[int, Sequence[Any]]) -> set[Part]:
    """Return the parts that this rank writes: each group divides what it holds, largest tensors first.

    The size of the whole tensor counts, not that of the part. So all groups of a hybrid layout decide alike, and
    tensors of one shape have few different layouts.
    """
    replies = {r: iter(reply) for r, reply in answers.items()}
    groups: dict[str, list[Any]] = {}
    for name, offset, shape, whole, dtype in entries:
        group, count, place = next(replies[referee(name, size)])
        weight = math.prod(whole) * getattr(torch, dtype).itemsize
        groups.setdefault(group, []).append((-weight, name, offset, shape, count, place))
    mine: set[Part] = set()
    for held in groups.values():
        count, place = held[0][-2:]
        if count == 1:
            mine.update(part[1:4] for part in held)
            continue
        loads = [0] * count
        for weight, name, offset, shape, _, _ in sorted(held):
            writer = loads.index(min(loads))
            loads[writer] -= weight
            if writer == place:
                mine.add((name, offset, shape))
    return mine


def by_referee(mine: Iterable[Part], size: int) -> dict[int, list[Part]]:
    to: dict[int, list[Part]] = {}
    for part in sorted(mine):
        to.setdefault(referee(part[0], size), []).append(part)
    return to


def describe(
    received: Mapping[int, Sequence[Any]], confirmed: Mapping[int, Sequence[Any]]
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return a referee's tensors, name → (shape, dtype, key of the layout), and its layouts by key."""
    kinds = {name: kind for entries in received.values() for name, _, _, *kind in entries}
    pieces: dict[str, list[layouts.Piece]] = {name: [] for name in kinds}
    for r in sorted(confirmed):
        for name, offset, shape in confirmed[r]:
            pieces[name].append((r, tuple(offset), tuple(shape)))
    tensors, described = {}, {}
    for name, (whole, dtype) in kinds.items():
        try:
            content = layouts.of(tuple(whole), pieces[name]).as_json()
        except layouts.LayoutError as error:
            raise CheckpointError(f"the ranks' shards of {name} do not cover it exactly once: {error}") from error
        key = hashlib.sha256(json.dumps(content).encode()).hexdigest()[:32]
        tensors[name], described[key] = (whole, dtype, key), content
    return tensors, described


def index(tensors: Iterable[Mapping[str, Any]], described: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the manifest's index: each tensor's shape, dtype and layout number, and the distinct layouts."""
    by_key = {key: content for part in described for key, content in part.items()}
    numbers = {key: i for i, key in enumerate(sorted(by_key))}
    merged = {name: entry for part in tensors for name, entry in part.items()}
    listed = {
        name: {"shape": merged[name][0], "dtype": merged[name][1], "layout": numbers[merged[name][2]]}
        for name in sorted(merged)
    }
    return {"tensors": listed, "layouts": [by_key[key] for key in numbers]}
