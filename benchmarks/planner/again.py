"""What it costs the host to compute a block again: Megatron's checkpoint function beside torch's, on a CPU.

`python benchmarks/planner/again.py` (10 s, one core, no GPU). Blocks have 32 columns, so that calls take the time.
From it comes MEGATRON_AGAIN of dtrain/plan/time/stack.py: torch's cost was measured on an H200 in launches, and this
is the ratio of the two. What stands for Megatron's reads and sets the host's generator where that has the GPU's.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

WIDTH, HEADS, BLOCKS, ROUNDS = 32, 4, 4, 40


class Block(nn.Module):
    """A block with Megatron's operations: scores are written, dropout in three places."""

    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(2))
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        tokens, batch, _ = x.shape
        joined = self.qkv(self.norms[0](x)).view(tokens, batch * HEADS, 3 * WIDTH // HEADS)
        q, k, v = (part.transpose(0, 1) for part in joined.chunk(3, -1))
        scores = F.dropout(torch.softmax(torch.bmm(q, k.transpose(1, 2)), -1), 0.1)
        mixed = torch.bmm(scores, v).transpose(0, 1).contiguous().view(tokens, batch, WIDTH)
        x = x + F.dropout(self.out(mixed), 0.1)
        return x + F.dropout(self.down(F.gelu(self.up(self.norms[1](x)))), 0.1)


tracked = {"tensor ranks": torch.get_rng_state()}  # generators by name


def states() -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    return torch.get_rng_state(), torch.get_rng_state(), dict(tracked)


def put_back(kept: tuple[Tensor, Tensor, dict[str, Tensor]]) -> None:
    torch.set_rng_state(kept[0])
    torch.set_rng_state(kept[1])
    tracked.update(kept[2])


class Again(torch.autograd.Function):
    """What Megatron's does (mpu/random.py): states of two generators and a table of others, and a backward inside."""

    @staticmethod
    def forward(ctx: Any, block: nn.Module, x: Tensor) -> Tensor:
        ctx.block, ctx.then = block, states()
        with torch.no_grad():
            result: Tensor = block(x)
        ctx.save_for_backward(x)
        return result

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, Tensor | None]:
        now = states()
        put_back(ctx.then)
        x = ctx.saved_tensors[0].detach().requires_grad_()
        with torch.enable_grad():
            result = ctx.block(x)
        put_back(now)
        torch.autograd.backward(result, gradient)
        return None, x.grad


def twice(block: nn.Module, x: Tensor) -> Tensor:
    """The same operations without anything around them."""
    with torch.no_grad():
        block(x)
    result: Tensor = block(x)
    return result


WAYS: dict[str, Callable[[nn.Module, Tensor], Tensor]] = {
    "without checkpointing, forward twice": twice,
    "torch's checkpoint": lambda block, x: checkpoint(block, x, use_reentrant=False),
    "Megatron's checkpoint": Again.apply,
}


def measure() -> dict[str, float]:
    """Seconds of a block, forward and backward, by way: the best of many rounds, as another process may be running."""
    blocks, start = [Block() for _ in range(BLOCKS)], torch.randn(8, 2, WIDTH)
    best = dict.fromkeys(WAYS, float("inf"))
    for _ in range(ROUNDS):
        for name, way in WAYS.items():
            began = time.perf_counter()
            for _ in range(4):
                x = start.clone().requires_grad_()
                for block in blocks:
                    x = way(block, x)
                x.sum().backward()
            best[name] = min(best[name], (time.perf_counter() - began) / (4 * BLOCKS))
    return best


def main() -> None:
    torch.set_num_threads(1)
    best = measure()
    for name, seconds in best.items():
        print(f"{name:40}{seconds * 1e6:8.0f} us a block")
    plain, torchs, megatrons = best.values()
    print(f"Megatron's costs the host {(megatrons - plain) / (torchs - plain):.3f} of what torch's does")


if __name__ == "__main__":
    main()
