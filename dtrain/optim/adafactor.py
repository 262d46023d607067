"""Adafactor (Shazeer and Stern, 2018): row and column means of squared gradients instead of a second moment.

On whole weights it is torch's own step. Where ranks hold parts of a weight, each adds the sums of its part, and one
all-reduce gives all ranks the sums of the whole rows and columns, another one the size of each update. The factors are
small, so every rank that holds a part of a weight has them whole.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from dtrain.optim.owners import Piece, slices
from dtrain.util.collective import gather, rank
from dtrain.util.dtensor import local

FACTORS = ("row_var", "col_var")
VARIANCE = "variance"  # of a vector


class Adafactor(torch.optim.Adafactor):
    """torch.optim.Adafactor, also for parts of weights. Without `share`, each rank computes on whole weights."""

    pieces: Mapping[Tensor, list[Piece]] | None = None
    device = torch.device("cpu")

    def share(self, pieces: Mapping[Tensor, list[Piece]], device: torch.device) -> None:
        """From now on, compute together with all other ranks. `pieces`: what each parameter holds of its weights.

        `device`: of the collectives; weights that are offloaded are elsewhere.
        """
        self.pieces, self.device = pieces, device
        self.plans: dict[tuple[int, ...], Plan] = {}

    def create_state(self) -> None:
        """Create the state of parts of weights; torch creates that of whole ones at the first step."""
        if self.pieces is None:
            return
        for group in self.param_groups:
            for p in group["params"]:
                slots = self.state[p]
                if "step" in slots:
                    continue
                slots["step"] = torch.zeros(())
                held = [piece for piece in self.pieces[p] if math.prod(piece.shape)]
                for piece in held:
                    for key, shape in zip(FACTORS, factor_shapes(piece.whole), strict=False):
                        slots[slot(piece, key)] = torch.zeros(shape, device=local(p).device)
                    if len(piece.whole) < 2:
                        like = p if piece.start is None else piece.of(local(p)).reshape(-1)
                        slots[slot(piece, VARIANCE)] = torch.zeros_like(like, memory_format=torch.preserve_format)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        if self.pieces is None:
            return super().step(closure)
        loss = None if closure is None else torch.enable_grad()(closure)()
        self.create_state()
        moved = [(p, group) for group in self.param_groups for p in group["params"] if p.grad is not None]
        key = tuple(id(p) for p, _ in moved)
        if key not in self.plans:
            self.plans[key] = Plan.of([(p, piece) for p, _ in moved for piece in self.pieces[p]])
        self.update(moved, self.plans[key])
        return loss

    def update(self, moved: list[tuple[Tensor, dict[str, Any]]], plan: Plan) -> None:
        for p, _ in moved:
            self.state[p]["step"] += 1
        groups = {id(p): group for p, group in moved}
        sums = Sums(plan.shapes, self.device)
        for part in plan.parts:
            if part.counts:
                sums.add(part.piece, part.gradient, part.values)
        dist.all_reduce(sums.buffer)
        for part in plan.parts:
            self.average(part, groups[id(part.parameter)], sums)
        lengths = torch.zeros(len(plan.shapes), device=self.device)
        of_weight = dict(zip(plan.shapes, lengths.unbind(), strict=True))
        for part in plan.parts:
            if part.counts:
                update = self.direction(part, groups[id(part.parameter)])
                of_weight[part.piece.name] += update.square_().sum().to(self.device)
        dist.all_reduce(lengths)
        for part in plan.parts:
            group, count = groups[id(part.parameter)], math.prod(part.piece.whole)
            clipped = (of_weight[part.piece.name] / count).sqrt().div(group["d"]).clamp(min=1.0)
            size = (sums.squares[part.piece.name] / count).sqrt().clamp(min=group["eps"][1])
            rate = min(group["lr"], float(self.state[part.parameter]["step"]) ** -0.5)
            values, factor = part.values, rate * size / clipped
            values.mul_(1 - group["lr"] * group["weight_decay"])
            # once more, and not kept: all updates together are as large as the weights
            values.sub_(self.direction(part, group).mul_(factor.to(values.device)))

    def average(self, part: Part, group: dict[str, Any], sums: Sums) -> None:
        """Update the factors of a weight, or this part of a vector's variance."""
        slots, piece = self.state[part.parameter], part.piece
        weight = float(slots["step"]) ** group["beta2_decay"]
        if len(piece.whole) < 2:
            variance(slots, piece).lerp_(part.gradient.square(), weight)
        elif part.first:
            for key, total, count in zip(FACTORS, sums.factors[piece.name], piece.whole[:-3:-1], strict=True):
                held = slots[slot(piece, key)]
                held.lerp_((total / count).to(held.device), weight)

    def direction(self, part: Part, group: dict[str, Any]) -> Tensor:
        """Return this part of the update, before it is clipped and scaled. The factors must be those of this step."""
        slots, piece, gradient = self.state[part.parameter], part.piece, part.gradient
        eps = group["eps"][0]
        eps = torch.finfo(gradient.dtype).eps if eps is None else eps
        if len(piece.whole) > 1:
            row, column = (slots[slot(piece, key)] for key in FACTORS)
            box = slices((piece.offset, piece.shape))
            every = slice(None)
            mean = row.mean(dim=-2, keepdim=True).clamp_(min=eps)[(*box[:-2], every, every)]
            estimate = row[(*box[:-1], every)] * column[(*box[:-2], every, box[-1])]
            estimate.div_(mean)
        else:
            estimate = variance(slots, piece).clone()
        return estimate.clamp_(min=eps * eps).rsqrt_().mul_(gradient)


@dataclass(frozen=True, eq=False)
class Part:
    """A box of a weight on this rank."""

    parameter: Tensor
    piece: Piece
    counts: bool  # in sums over ranks: no other rank, and no other copy here, adds the same box
    first: bool  # of the boxes of this weight in this parameter

    @property
    def values(self) -> Tensor:
        return self.piece.of(local(self.parameter))

    @property
    def gradient(self) -> Tensor:
        assert self.parameter.grad is not None
        return self.piece.of(local(self.parameter.grad))


@dataclass(frozen=True)
class Plan:
    """Which weights all ranks update together, and which of their boxes this rank has. Collective."""

    shapes: dict[str, tuple[int, ...]]
    parts: list[Part]

    @staticmethod
    def of(held: list[tuple[Tensor, Piece]]) -> Plan:
        held = [(p, piece) for p, piece in held if math.prod(piece.shape)]
        mine = [(piece.name, piece.whole, piece.offset, piece.shape) for _, piece in held]
        everywhere = gather(mine)
        shapes = {name: whole for boxes in everywhere for name, whole, _, _ in boxes}
        before = {box for boxes in everywhere[: rank()] for box in boxes}
        parts, seen = [], set()
        for (p, piece), box in zip(held, mine, strict=True):
            parts.append(Part(p, piece, box not in before, (id(p), piece.name) not in seen))
            before.add(box)
            seen.add((id(p), piece.name))
        return Plan({name: shapes[name] for name in sorted(shapes)}, parts)


class Sums:
    """Squares of gradients summed by rows and columns, and of weights; one buffer, so one all-reduce."""

    def __init__(self, shapes: dict[str, tuple[int, ...]], device: torch.device) -> None:
        size = sum(1 + sum(map(math.prod, factor_shapes(shape))) for shape in shapes.values())
        self.buffer = torch.zeros(size, device=device)
        # by name, as views of the buffer
        self.factors: dict[str, list[Tensor]] = {}
        self.squares: dict[str, Tensor] = {}
        at = 0
        for name, shape in shapes.items():
            self.squares[name], at = self.buffer[at], at + 1
            self.factors[name] = []
            for of_factor in factor_shapes(shape):
                count = math.prod(of_factor)
                self.factors[name].append(self.buffer[at : at + count].view(of_factor))
                at += count

    def add(self, piece: Piece, gradient: Tensor, values: Tensor) -> None:
        self.squares[piece.name] += values.square().sum().to(self.buffer.device)
        if len(piece.whole) > 1:
            box, every, square = slices((piece.offset, piece.shape)), slice(None), gradient.square()
            row, column = self.factors[piece.name]
            row[(*box[:-1], every)] += square.sum(-1, keepdim=True).to(row.device)
            column[(*box[:-2], every, box[-1])] += square.sum(-2, keepdim=True).to(row.device)


def slot(piece: Piece, key: str) -> str:
    """Return a key in the optimizer's state: a flat parameter of ZeRO has several weights."""
    return key if piece.start is None else f"{piece.name}.{key}"


def variance(slots: Mapping[str, Any], piece: Piece) -> Tensor:
    """Return a vector's second moment, of the part that this rank has."""
    values = local(slots[slot(piece, VARIANCE)])
    return values if piece.start is None else values.view(piece.shape)


def factor_shapes(shape: tuple[int, ...]) -> tuple[tuple[int, ...], ...]:
    """Return the shapes of the row and the column factor, as in torch; none of a vector."""
    return ((*shape[:-1], 1), (*shape[:-2], 1, shape[-1])) if len(shape) > 1 else ()
