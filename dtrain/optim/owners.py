"""Give each matrix to one rank: the parts travel to it, it computes on the whole, and the parts of the result return.

The layout does not matter: each rank says once which boxes of which matrices it holds (all of them under ddp, shards of
fsdp or tensor parallel, ranges of ZeRO). The matrices of one shape are one message: while a rank computes on them, the
next ones arrive, and results return.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from dtrain.util.collective import gather, rank, world_size

Compute = Callable[[Sequence[Tensor]], list[Tensor]]
Received = list[list[Tensor]]  # by the rank that sent
Box = tuple[tuple[int, ...], tuple[int, ...]]  # offset and shape


@dataclass(frozen=True)
class Piece:
    """What a rank's parameter holds of a matrix: a box. `start`: where it begins in a flat parameter of ZeRO."""

    name: str
    whole: tuple[int, ...]
    offset: tuple[int, ...]
    shape: tuple[int, ...]
    start: int | None = None

    def of(self, values: Tensor) -> Tensor:
        """Return the piece's part of the parameter's values, or of anything with the same layout."""
        if self.start is None:
            return values
        return values[self.start : self.start + math.prod(self.shape)].view(self.shape)


class Owners:
    """Who computes each matrix, and what each rank sends to whom. All ranks create it together."""

    def __init__(self, pieces: Sequence[Piece], device: torch.device, dtype: torch.dtype) -> None:
        """`dtype`: that of the matrices, and of what is sent."""
        self.device, self.dtype = device, dtype
        self.rank, self.num_ranks = rank(), world_size()
        # gloo cannot send from a GPU
        on_host = device.type == "cpu" or (self.num_ranks > 1 and dist.get_backend() == "gloo")
        self.link = torch.device("cpu") if on_host else device
        held: dict[str, list[Box]] = defaultdict(list)
        shapes: dict[str, tuple[int, ...]] = {}
        for piece in pieces:
            if math.prod(piece.shape):
                held[piece.name].append((piece.offset, piece.shape))
                shapes[piece.name] = piece.whole
        everywhere = gather((dict(held), shapes))
        self.held = [boxes for boxes, _ in everywhere]
        self.shapes = {name: shape for _, known in everywhere for name, shape in known.items()}
        self.holders = {name: [r for r in range(self.num_ranks) if name in self.held[r]] for name in self.shapes}
        self.none = torch.empty(0, dtype=dtype, device=device)
        self.owner = self.balanced()
        self.sender = {name: self.senders(name) for name in self.shapes}
        buckets: dict[tuple[int, ...], list[str]] = defaultdict(list)
        for name in sorted(self.shapes):
            buckets[self.shapes[name]].append(name)
        self.buckets = [buckets[shape] for shape in sorted(buckets)]

    def balanced(self) -> dict[str, int]:
        """Give each matrix, the most expensive first, to the rank with the least work among those that hold it."""
        work, owner = [0.0] * self.num_ranks, {}
        for name, shape in sorted(self.shapes.items(), key=lambda item: (-cost(item[1]), item[0])):
            owner[name] = min(self.holders[name], key=lambda r: work[r])
            work[owner[name]] += cost(shape)
        return owner

    def senders(self, name: str) -> dict[Box, int]:
        """Return which rank sends each box of a matrix to its owner: the owner itself if it has it, else the first."""
        found: dict[Box, int] = {}
        for r in [self.owner[name], *range(self.num_ranks)]:
            for box in self.held[r].get(name, []):
                found.setdefault(box, r)
        assert sum(math.prod(shape) for _, shape in found) == math.prod(self.shapes[name]), "parts overlap"
        return found

    def compute(self, parts: dict[str, list[Tensor]], function: Compute) -> dict[str, list[Tensor]]:
        """Return the parts of the function's results, for this rank's parts of the matrices."""
        arriving = [self.to_owners(names, parts) for names in self.buckets]
        returning = []
        for names, arrival in zip(self.buckets, arriving, strict=True):
            mine = [name for name in names if self.owner[name] == self.rank]
            whole = self.assembled(mine, arrival(), parts)
            results = dict(zip(mine, function(whole) if mine else [], strict=True))
            returning.append((self.to_holders(names, results), results))
        found: dict[str, list[Tensor]] = {name: [] for name in parts}
        for names, (arrival, results) in zip(self.buckets, returning, strict=True):
            received = arrival()
            for name in (name for name in names if name in parts):
                for box in self.held[self.rank].get(name, []):
                    if name in results:
                        found[name].append(results[name][slices(box)])
                    else:
                        found[name].append(received[self.owner[name]].pop(0).view(box[1]))
        return found

    def to_owners(self, names: list[str], parts: dict[str, list[Tensor]]) -> Callable[[], Received]:
        """Send this rank's boxes of some matrices to their owners."""
        sent: list[list[Tensor]] = [[] for _ in range(self.num_ranks)]
        sizes: list[list[int]] = [[] for _ in range(self.num_ranks)]
        for name in names:
            for box, sender in self.sender[name].items():
                if sender == self.rank != self.owner[name]:
                    sent[self.owner[name]].append(parts[name][self.held[self.rank][name].index(box)])
                elif sender != self.rank == self.owner[name]:
                    sizes[sender].append(math.prod(box[1]))
        return self.send(names, sent, sizes)

    def to_holders(self, names: list[str], results: dict[str, Tensor]) -> Callable[[], Received]:
        """Send boxes of the results to every rank that holds them."""
        sent: list[list[Tensor]] = [[] for _ in range(self.num_ranks)]
        sizes: list[list[int]] = [[] for _ in range(self.num_ranks)]
        for name in names:
            if self.owner[name] != self.rank:
                sizes[self.owner[name]] += [math.prod(shape) for _, shape in self.held[self.rank].get(name, [])]
                continue
            for r in range(self.num_ranks):
                if r != self.rank:
                    sent[r] += [results[name][slices(box)] for box in self.held[r].get(name, [])]
        return self.send(names, sent, sizes)

    def send(self, names: list[str], sent: list[list[Tensor]], sizes: list[list[int]]) -> Callable[[], Received]:
        """Start to send each rank its tensors; the returned function waits, and returns what arrived from each rank."""
        if all(len(self.holders[name]) == 1 for name in names):
            return lambda: [[] for _ in sizes]
        outgoing = torch.cat([self.none, *(t.reshape(-1) for tensors in sent for t in tensors)]).to(self.link)
        incoming = torch.empty(sum(map(sum, sizes)), dtype=self.dtype, device=self.link)
        out_sizes = [sum(t.numel() for t in tensors) for tensors in sent]
        work = dist.all_to_all_single(incoming, outgoing, [sum(s) for s in sizes], out_sizes, async_op=True)

        def wait() -> Received:
            work.wait()
            parts = iter(incoming.to(self.device).split([n for of_rank in sizes for n in of_rank]))
            return [[next(parts) for _ in of_rank] for of_rank in sizes] if incoming.numel() else [[] for _ in sizes]

        wait.kept = outgoing  # type: ignore[attr-defined]  # until it is sent
        return wait

    def assembled(self, names: list[str], received: Received, parts: dict[str, list[Tensor]]) -> list[Tensor]:
        """Return the whole matrices that this rank owns."""
        matrices = []
        for name in names:
            boxes = self.sender[name]
            if len(boxes) == 1 and next(iter(boxes.values())) == self.rank:
                matrices.append(parts[name][0])
                continue
            matrix = torch.empty(self.shapes[name], dtype=self.dtype, device=self.device)
            for box, sender in boxes.items():
                if sender == self.rank:
                    values = parts[name][self.held[self.rank][name].index(box)]
                else:
                    values = received[sender].pop(0).view(box[1])
                matrix[slices(box)].copy_(values)
            matrices.append(matrix)
        return matrices


def slices(box: Box) -> tuple[slice, ...]:
    return tuple(slice(o, o + n) for o, n in zip(*box, strict=True))


def cost(shape: tuple[int, ...]) -> float:
    """Return the work of orthogonalizing a matrix, up to a factor."""
    return math.prod(shape) * min(shape)
