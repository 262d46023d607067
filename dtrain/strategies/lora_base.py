"""The base of a model with adapters: filled like every weight, never saved, and known again by a fingerprint.

What is never changed need not be saved: the first weights (a seed, or init_from) bring it back. A checkpoint has the
fingerprint, so adapters never meet another base than the one that they were trained on.
"""

from __future__ import annotations

import dataclasses
import hashlib
import math

import torch
import torch.distributed as dist
from torch import nn

from dtrain.models import lora
from dtrain.shards import Chunk, Held, chunks_of
from dtrain.weights import Drawn

NARROW = (torch.bfloat16, torch.float16)
SAMPLES = 16  # elements of each weight that make the fingerprint: one differs as soon as a weight was trained on


class First:
    """First weights that remember what they made the base of. Without adapters there is none."""

    def __init__(self, source: Drawn, model: nn.Module) -> None:
        self.source = source
        self.base = dict(sorted(lora.base_of(model).items()))  # shapes, of the whole model: the same on every rank
        # the bits of each sampled element plus 1; 0: another rank holds it
        self.seen = {name: [0] * SAMPLES for name in self.base}

    @torch.no_grad()
    def fill(self, model: nn.Module, name: str, held: Held, device: torch.device) -> None:
        """Give a weight or buffer its first value. One of 16 bits is made in float32, and rounded to what it is."""
        chunks = chunks_of(held)
        wide = [
            dataclasses.replace(c, values=torch.empty_like(c.values, dtype=torch.float32))
            if c.values.dtype in NARROW else c
            for c in chunks
        ]  # fmt: skip
        self.source.fill(model, name, wide if wide != chunks else held, device)
        for chunk, made in zip(chunks, wide, strict=True):
            if name in self.base:
                self.look(name, made)
            if made is not chunk:
                chunk.values.copy_(made.values)

    def look(self, name: str, chunk: Chunk) -> None:
        """Keep those of the weight's samples that lie in a chunk."""
        places = {}
        for i in range(SAMPLES):
            place = unravel(sample(name, i) % math.prod(chunk.whole_shape), chunk.whole_shape)
            if all(box.start <= x < box.stop for x, box in zip(place, chunk.box, strict=True)):
                places[i] = [x - box.start for x, box in zip(place, chunk.box, strict=True)]
        if places:
            where = torch.tensor(list(places.values()), device=chunk.values.device).t()
            bits = chunk.values[tuple(where)].reshape(-1).contiguous().view(torch.int32).tolist()
            for i, value in zip(places, bits, strict=True):
                self.seen[name][i] = (value & 0xFFFFFFFF) + 1

    def fingerprint(self) -> str | None:
        """Tells one base from another, whatever layout and type it is held in; None if there is no base. Collective."""
        if not self.base:
            return None
        seen = torch.tensor(list(self.seen.values()))
        if dist.is_initialized() and dist.get_world_size() > 1:
            seen = seen.to("cuda") if dist.get_backend() == "nccl" else seen
            dist.all_reduce(seen, op=dist.ReduceOp.MAX)  # whoever holds an element holds the same
        assert bool((seen > 0).all()), "a weight of the base was not filled"
        text = f"{self.base}{seen.tolist()}"
        return hashlib.sha256(text.encode()).hexdigest()[:16]


def check(expected: str | None, found: str | None) -> None:
    """Refuse to put a checkpoint's adapters on another base than its own."""
    if expected != found:
        raise ValueError(
            "init_from: the frozen weights are not those that this run's adapters were trained on "
            f"(fingerprint {expected} then, {found} now)\n"
            "  fix: bring back the file that init_from names; or, if they were drawn from train.seed, use the kind of "
            "device that the run began on: a CPU and a GPU draw differently"
        )


def sample(name: str, i: int) -> int:
    return int.from_bytes(hashlib.sha256(f"{name}/{i}".encode()).digest()[:8])


def unravel(at: int, shape: tuple[int, ...]) -> list[int]:
    """The place of an element of the flattened whole."""
    place: list[int] = []
    for size in reversed(shape):
        at, x = divmod(at, size)
        place.insert(0, x)
    return place
