"""A few small tensors, saved as checkpoints of a run."""

from __future__ import annotations

from pathlib import Path

import torch

from dtrain.checkpoint import store
from dtrain.checkpoint.manifest import Manifest


def state(scale: float = 1.0) -> dict[str, torch.Tensor]:
    return {
        "model.weight": torch.arange(35, dtype=torch.float32).reshape(5, 7) * scale,
        "model.half": torch.arange(6, dtype=torch.bfloat16) * scale,
        "model.scalar": torch.tensor(3.5 * scale),
        "optim.weight.exp_avg": torch.full((5, 7), 0.25 * scale),
    }


def saved(folder: Path, *steps: int, keep: int = 10) -> None:
    for step in steps:
        store.save(folder, step, state(float(step)), {"samples": step * 8, "extra": {}}, keep)


def assert_holds(path: Path, content: Manifest, scale: float) -> None:
    target = {name: torch.zeros_like(t) for name, t in state().items()}
    store.load(path, content, target)
    assert all(torch.equal(target[name], t) for name, t in state(scale).items())


def flip(path: Path, bit: int) -> None:
    with open(path, "r+b") as file:
        file.seek(bit // 8)
        byte = file.read(1)[0]
        file.seek(bit // 8)
        file.write(bytes([byte ^ (1 << bit % 8)]))
