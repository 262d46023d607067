"""Compare replicas, and stop the run if they differ: ranks that hold the same tensors compare checksums of the bits.

A flipped bit, a faulty GPU or a missed update makes replicas diverge. The loss does not show it, and a checkpoint,
which takes each tensor from one of its holders, would mix the two models. So every rank computes a checksum of each
tensor that another rank also holds, and one small all-reduce per mesh axis compares them. A DTensor's placements give
the axes along which it is replicated; values that are equal along each of these axes are equal on all holders. So no
rank lists what others hold, and a check is O(tensors) on each rank.
"""

from __future__ import annotations

import hashlib
import socket
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from dtrain.strategies.base import Strategy
from dtrain.strategies.checksums import checksums
from dtrain.strategies.optimizer_state import is_tensor
from dtrain.util.dtensor import Held, chunks_of, is_dtensor, local

NOTHING = torch.iinfo(torch.int64).min  # neutral under MAX: this rank does not hold the tensor
DATA_AXES = {"dp", "replicate", "shard"}  # names of the data-parallel axis, whole or split into replicas and shards
MAX_REPORTED = 8  # tensors and ranks named in an error message


class ReplicaError(RuntimeError):
    """Ranks that must hold the same bits do not; the message names rank, host and tensor."""


# ---- the check -----------------------------------------------------------------------------------------------


@dataclass
class Axis:
    """What this rank compares with its peers along one mesh axis."""

    group: dist.ProcessGroup
    boxes: list[str]  # tensors that several ranks of the group hold; the same list on all of them
    held: list[int]  # which of these this rank holds
    places: list[int]  # their indices in the vector of checksums


class Replicas:
    """Compares the replicas of one strategy. Every rank has one and calls it after the same steps."""

    def __init__(self, strategy: Strategy) -> None:
        self.strategy = strategy
        self.layouts: dict[tuple[bool, int], tuple[list[str], list[Axis]]] = {}

    def check(self, step: int, state: Mapping[str, Held] | None = None) -> None:
        """Raise ReplicaError on all ranks if replicas differ. `state`: the tensors about to be saved.

        Without `state`, only weights and optimizer state are compared: buffers may differ until they are shared (a
        user's batch norm), and so may weights under a strategy that says so (local_sgd).
        """
        if dist.get_world_size() == 1 or (state is None and not self.strategy.in_step()):
            return
        tensors = held_tensors(self.strategy, state)
        names, axes = self.layout(tensors, is_save=state is not None)
        device = self.strategy.device
        sums = checksums([local(tensors[name]) for name in names], device)
        differing = [compare(axis, sums) for axis in axes]
        found = torch.cat([torch.zeros(1, dtype=torch.bool, device=device), *differing]).any().int()
        if [dist.get_world_size(axis.group) for axis in axes] != [dist.get_world_size()]:
            dist.all_reduce(found, dist.ReduceOp.MAX)  # all ranks stop or none
        if found.item():
            raise ReplicaError(describe(self.strategy, step, axes, differing, sums))

    def layout(self, tensors: dict[str, Tensor], is_save: bool) -> tuple[list[str], list[Axis]]:
        """Return which tensors other ranks also hold, and along which axes. Collective."""
        key = (is_save, len(tensors))  # the optimizer creates its state at its first update
        is_new = torch.tensor([key not in self.layouts], dtype=torch.int32)
        dist.all_reduce(is_new, dist.ReduceOp.MAX)  # lay_out() is collective: all ranks call it or none
        if is_new.item():
            self.layouts[key] = lay_out(self.strategy, tensors)
        return self.layouts[key]

    def held_alone(self) -> dict[str, Tensor]:
        """Return the weights and optimizer state that only this rank holds. Collective."""
        tensors = held_tensors(self.strategy, None)
        if dist.get_world_size() == 1:
            return tensors
        shared = set(self.layout(tensors, is_save=False)[0])
        return {name: tensor for name, tensor in tensors.items() if name not in shared and local(tensor).numel()}


def held_tensors(strategy: Strategy, state: Mapping[str, Held] | None) -> dict[str, Tensor]:
    """Return what this rank holds, by name: all weights, optimizer state, counters, and the state to be saved.

    Under zero these are the weights that the model computes with: masters and optimizer state have one holder each.
    """
    tensors: dict[str, Tensor] = {}
    counters: dict[str, dict[str, Any]] = defaultdict(dict)
    for name, p in strategy.module.named_parameters():
        tensors[f"model.{name}"] = p.detach()
        for key, value in strategy.optimizer.state.get(strategy.updated(p), {}).items():
            if is_tensor(key, value, p):
                tensors[f"optim.{name}.{key}"] = value
            else:
                counters[key][name] = value
    tensors |= {name: held for name, held in (state or {}).items() if isinstance(held, Tensor)}
    for key, values in counters.items():  # stacks the counters of all weights: one kernel instead of hundreds
        of = hashlib.sha256("\n".join(values).encode()).hexdigest()[:16]
        scalars = [
            local(value) if isinstance(value, Tensor) else torch.tensor(float(value)) for value in values.values()
        ]
        tensors[f"optim.*.{key} {of}"] = torch.stack(scalars)
    precision = [strategy.precision.scale, strategy.precision.good_steps]
    return tensors | {"precision.scale": torch.tensor(precision, dtype=torch.float64)}


def lay_out(strategy: Strategy, tensors: dict[str, Tensor]) -> tuple[list[str], list[Axis]]:
    """Find which tensors other ranks also hold, and along which axes. Collective, and done once."""
    sizes, mesh = strategy.sizes, strategy.mesh
    buffers = {f"model.{name}" for name, _ in strategy.module.named_buffers()}
    along: dict[str, list[str]] = defaultdict(list)
    groups: dict[str, dist.ProcessGroup] = {}
    for name, tensor in tensors.items():
        own, covered = own_axes(tensor)
        if sizes.token_ranks > 1 and not covered & DATA_AXES:
            own["dp"] = strategy.data_group
        if sizes.tp > 1 and "tp" not in covered:
            own["tp"] = mesh.get_group("tp")
        if sizes.pp > 1 and name not in buffers:  # weights may be tied across two stages; buffers are not shared
            own["pp"] = mesh.get_group("pp")
        groups |= own
        for axis in own:
            along[axis].append(name)
    shared = {axis: shared_boxes(along[axis], tensors, groups[axis]) for axis in sorted(groups)}
    names = list(dict.fromkeys(name for mine, _ in shared.values() for name in mine.values()))
    place = {name: i for i, name in enumerate(names)}
    return names, [
        Axis(groups[axis], boxes, list(mine), [place[name] for name in mine.values()])
        for axis, (mine, boxes) in shared.items()
    ]


def own_axes(tensor: Tensor) -> tuple[dict[str, dist.ProcessGroup], set[str]]:
    """Return the mesh axes along which a DTensor is replicated, and the names of all axes of its mesh."""
    if not is_dtensor(tensor):
        return {}, set()
    mesh: Any = tensor.device_mesh  # type: ignore[attr-defined]
    if not mesh.mesh_dim_names:  # from a user's strategy: treated as a plain tensor, whose boxes are compared
        return {}, set()
    placements: Any = tensor.placements  # type: ignore[attr-defined]
    groups = {
        name: mesh.get_group(dim)
        for dim, (name, placement) in enumerate(zip(mesh.mesh_dim_names, placements, strict=True))
        if placement.is_replicate() and mesh.size(dim) > 1
    }
    return groups, set(mesh.mesh_dim_names)


def shared_boxes(
    names: list[str], tensors: Mapping[str, Tensor], group: dist.ProcessGroup
) -> tuple[dict[int, str], list[str]]:
    """Return this rank's names by box index, and the list of boxes that several ranks of the group hold.

    Usually all ranks hold the same boxes, and one all-reduce confirms it. Otherwise (pipeline stages, fairscale's
    optimizer state) the ranks all-gather their lists.
    """
    chunks = [chunks_of(tensors[name])[0] for name in names]
    boxes = [f"{n} {c.values.dtype} {c.offset} {c.shape}" for n, c in zip(names, chunks, strict=True)]
    digest = hashlib.sha256("\n".join(boxes).encode()).digest()
    number = torch.tensor([int.from_bytes(digest[:8], "big", signed=True)])
    if not differ(number, ~number, group).any():
        return dict(enumerate(names)), boxes
    lists: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(lists, boxes, group=group)
    holders = Counter(box for held in lists for box in held)
    several = [box for box, count in holders.items() if count > 1]
    mine = dict(zip(boxes, names, strict=True))
    return {i: mine[box] for i, box in enumerate(several) if box in mine}, several


def compare(axis: Axis, sums: Tensor) -> Tensor:
    """Return which tensors differ between the ranks of the axis' group that hold them."""
    high = torch.full((len(axis.boxes),), NOTHING, device=sums.device)
    low = high.clone()
    held = torch.tensor(axis.held, device=sums.device)
    mine = sums[torch.tensor(axis.places, dtype=torch.int64, device=sums.device)]
    if axis.held:
        high[held], low[held] = mine, ~mine
    return differ(high, low, axis.group)


def differ(high: Tensor, low: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Return where max and min over the ranks differ: one MAX of x and of ~x, which reverses the order."""
    both = torch.cat([high, low])
    dist.all_reduce(both, dist.ReduceOp.MAX, group=group)
    high, low = both.chunk(2)
    return high != ~low


# ---- the message ---------------------------------------------------------------------------------------------


def describe(strategy: Strategy, step: int, axes: list[Axis], differing: list[Tensor], sums: Tensor) -> str:
    """Describe which ranks differ from the majority, and in which tensors. Collective: the same text on all ranks."""
    mine: dict[str, int] = {}
    for axis, differs in zip(axes, differing, strict=True):
        wrong = [(i, place) for i, place in zip(axis.held, axis.places, strict=True) if differs[i]]
        mine |= {axis.boxes[i]: int(sums[place]) for i, place in wrong[:MAX_REPORTED]}
    number = max([int(differs.sum()) for differs in differing], default=0)
    reports: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(reports, (socket.gethostname(), number, mine))
    hosts = [host for host, _, _ in reports]
    tensors_of: dict[tuple[int, ...], list[str]] = defaultdict(list)
    for box in dict.fromkeys(box for _, _, found in reports for box in found):
        holders = {rank: found[box] for rank, (_, _, found) in enumerate(reports) if box in found}
        tensors_of[minority(holders)].append(box.split(" ")[0])
    ranks, tensors = max(tensors_of.items(), key=lambda item: len(item[1]))
    number = max(number for _, number, _ in reports)
    more = f" and {number - 1} other tensor{'s' if number > 2 else ''}" if number > 1 else ""
    who = listed([f"rank {rank} ({hosts[rank]})" for rank in ranks])
    verb = "differs from its replicas" if len(ranks) == 1 else "differ"
    own = "" if type(strategy).__module__.startswith("dtrain.") else (
        f" {type(strategy).__name__} must also leave the same values on all ranks in state_dict()."
    )  # fmt: skip
    return (
        f"step {step}: {who} {verb} in {tensors[0]}{more}. Replicas must be equal bit for bit, so the run stops, and "
        "this state is not saved. Fix: resume this run from its last checkpoint, which was compared and is good, "
        f"and test the memory and GPUs of {listed(sorted({hosts[rank] for rank in ranks}))}: a hardware fault is the "
        f"usual cause.{own}"
    )


def minority(sums: Mapping[int, int]) -> tuple[int, ...]:
    """Return the ranks that do not hold the majority's value; all ranks if there is no majority."""
    ((value, count),) = Counter(sums.values()).most_common(1)
    return tuple(sums) if 2 * count <= len(sums) else tuple(rank for rank, mine in sums.items() if mine != value)


def listed(items: Iterable[str]) -> str:
    items = list(items)
    if len(items) > MAX_REPORTED:
        return f"{', '.join(items[:MAX_REPORTED])} and {len(items) - MAX_REPORTED} more"
    return " and ".join([", ".join(items[:-1]), items[-1]]) if len(items) > 1 else items[0]
