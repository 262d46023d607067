"""Adafactor is torch.optim.Adafactor on one rank, and so it is where ranks hold parts of a weight."""

from __future__ import annotations

import math
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

from dtrain.optim.build import adafactor
from dtrain.optim.owners import Piece
from dtrain.util.dtensor import flat_chunks
from tests.world import spawn

SHAPES = {"rows": (6, 5), "columns": (4, 6), "kernel": (4, 3, 2, 2), "vector": (8,), "copy": (3, 4), "stage": (5, 2)}
FLAT = {"a": (5, 7), "b": (6,), "c": (3, 2, 5)}  # one flat tensor, divided in the middle of a row


def values(shapes: dict[str, tuple[int, ...]], seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}


def whole_updates(shapes: dict[str, tuple[int, ...]], steps: int) -> dict[str, torch.Tensor]:
    """The weights after some of torch's own steps."""
    weights = {name: nn.Parameter(value) for name, value in values(shapes, 0).items()}
    optimizer = torch.optim.Adafactor(weights.values(), lr=0.3, weight_decay=0.1)
    for step in range(steps):
        for name, gradient in values(shapes, 1 + step).items():
            weights[name].grad = gradient
        optimizer.step()
    return {name: p.detach() for name, p in weights.items()}


def test_on_one_rank_it_is_torchs() -> None:
    ours = {name: nn.Parameter(value) for name, value in values(SHAPES, 0).items()}
    theirs = {name: nn.Parameter(value) for name, value in values(SHAPES, 0).items()}
    decayed = [p for p in theirs.values() if p.dim() > 1]
    options = {"lr": 0.3, "beta2_decay": -0.7, "eps": (1e-6, 1e-2), "d": 1.5}
    groups = [{"params": decayed, "weight_decay": 0.2}, {"params": [theirs["vector"]], "weight_decay": 0.0}]
    reference = torch.optim.Adafactor(groups, **options)  # type: ignore[arg-type]
    optimizer = adafactor(
        ours.items(), lr=0.3, beta2_decay=-0.7, eps1=1e-6, eps2=1e-2, max_update=1.5, weight_decay=0.2
    )
    for step in range(4):
        for name, gradient in values(SHAPES, 1 + step).items():
            ours[name].grad, theirs[name].grad = gradient.clone(), gradient.clone()
        optimizer.step()
        reference.step()
    assert all(torch.equal(ours[name], theirs[name]) for name in SHAPES)


def held_by(rank: int) -> dict[str, tuple[slice, ...]]:
    """Some are cut by rows, some by columns, one is a copy on each rank, one is on rank 1 only."""
    boxes = {
        "rows": (slice(0, 4) if rank == 0 else slice(4, 6), slice(0, 5)),
        "columns": (slice(0, 4), slice(0, 2) if rank == 0 else slice(2, 6)),
        "kernel": (slice(0, 2) if rank == 0 else slice(2, 4), slice(0, 3), slice(0, 2), slice(0, 2)),
        "vector": (slice(0, 3) if rank == 0 else slice(3, 8),),
        "copy": (slice(0, 3), slice(0, 4)),
        "stage": (slice(0, 5), slice(0, 2)),
    }
    return {name: box for name, box in boxes.items() if name != "stage" or rank == 1}


def update_together(out: Path) -> None:
    rank = dist.get_rank()
    boxes = held_by(rank)
    weights = {name: nn.Parameter(values(SHAPES, 0)[name][box].clone()) for name, box in boxes.items()}
    flat = torch.cat([value.reshape(-1) for value in values(FLAT, 0).values()])
    half = slice(0, 23) if rank == 0 else slice(23, len(flat))
    weights["flat"] = nn.Parameter(flat[half].clone())
    pieces = {
        weights[name]: [Piece(name, SHAPES[name], tuple(s.start for s in box), tuple(s.stop - s.start for s in box))]
        for name, box in boxes.items()
    }
    pieces[weights["flat"]], at = [], 0
    for name, shape in FLAT.items():
        low, high = max(at, half.start), min(at + math.prod(shape), half.stop)
        if low < high:
            part = weights["flat"].detach()[low - half.start : high - half.start]
            for chunk in flat_chunks(part, shape, low - at):
                start = int(chunk.values.storage_offset())
                pieces[weights["flat"]].append(Piece(name, shape, chunk.offset, chunk.shape, start))
        at += math.prod(shape)
    optimizer = adafactor(weights.items(), lr=0.3)
    for group in optimizer.param_groups:
        group["weight_decay"] = 0.1
    optimizer.share(pieces, torch.device("cpu"))
    for step in range(3):
        gradients = values(SHAPES, 1 + step)
        for name, box in boxes.items():
            weights[name].grad = gradients[name][box].clone()
        weights["flat"].grad = torch.cat([g.reshape(-1) for g in values(FLAT, 1 + step).values()])[half].clone()
        optimizer.step()
    whole = whole_updates(SHAPES, 3)
    for name, box in boxes.items():
        torch.testing.assert_close(weights[name].detach(), whole[name][box], atol=1e-6, rtol=1e-6, msg=name)
    together = torch.cat([value.reshape(-1) for value in whole_updates(FLAT, 3).values()])
    torch.testing.assert_close(weights["flat"].detach(), together[half], atol=1e-6, rtol=1e-6)
    assert optimizer.state[weights["columns"]]["row_var"].shape == (4, 1), "the factors are whole"
    of_flat = {key: len(value) for key, value in optimizer.state[weights["flat"]].items() if key.endswith("variance")}
    assert of_flat == ({} if rank == 0 else {"b.variance": 6}), "only vectors have one, each its own"
    (out / str(rank)).touch()


def test_parts_of_weights_are_updated_as_the_whole(tmp_path: Path) -> None:
    spawn(2, update_together, tmp_path)
    assert {path.name for path in tmp_path.iterdir()} >= {"0", "1"}
