"""The frozen base of a model with adapters: filled like every weight, never saved, identified by a fingerprint.

Frozen weights need not be saved: the initial weights (a seed, or init_from) restore them. A checkpoint holds their
fingerprint, so adapters are only ever loaded onto the base that they were trained on.
"""

from __future__ import annotations

import dataclasses
import hashlib
import math

import torch
import torch.distributed as dist
from torch import nn

from dtrain.checkpoint.initial_weights import Drawn
from dtrain.models import lora
from dtrain.util.dtensor import Chunk, Held, chunks_of

NARROW = (torch.bfloat16, torch.float16)
SAMPLES = 16  # sampled elements per weight for the fingerprint: training a weight changes at least one


class First:
    """Initial weights that sample the base as they fill it. Without adapters there is no base."""

    def __init__(self, source: Drawn, model: nn.Module) -> None:
        self.source = source
        self.base = dict(sorted(lora.base_of(model).items()))  # shapes in the whole model: the same on every rank
        # the bits of each sampled element plus 1; 0: another rank holds it
        self.seen = {name: [0] * SAMPLES for name in self.base}

    @torch.no_grad()
    def fill(self, model: nn.Module, name: str, held: Held, device: torch.device) -> None:
        """Fill a weight or buffer with its initial value. 16-bit ones are computed in fp32 and then rounded."""
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
        """Keep the weight's samples that are in this chunk."""
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
        """Return the base's fingerprint, the same for every layout and dtype; None if there is no base. Collective."""
        if not self.base:
            return None
        seen = torch.tensor(list(self.seen.values()))
        if dist.is_initialized() and dist.get_world_size() > 1:
            seen = seen.to("cuda") if dist.get_backend() == "nccl" else seen
            dist.all_reduce(seen, op=dist.ReduceOp.MAX)  # all holders of an element hold the same value
        assert bool((seen > 0).all()), "a weight of the base was not filled"
        text = f"{self.base}{seen.tolist()}"
        return hashlib.sha256(text.encode()).hexdigest()[:16]


def check(expected: str | None, found: str | None) -> None:
    """Refuse to load a checkpoint's adapters onto a different base."""
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
    """Return the index of an element, given its offset in the flattened tensor."""
    place: list[int] = []
    for size in reversed(shape):
        at, x = divmod(at, size)
        place.insert(0, x)
    return place
