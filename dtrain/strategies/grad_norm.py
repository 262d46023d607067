"""One gradient norm over shards, copies and pipeline stages; clipping by it."""

from __future__ import annotations

import math
from collections import defaultdict
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from dtrain.util.dtensor import is_dtensor, local


def total_norm(
    parameters: list[nn.Parameter], counted: list[nn.Parameter] | None = None, num_stages: int = 1
) -> Tensor:
    """Return one norm over all gradients, with the same bits on every rank.

    torch's own function refuses gradients on different meshes. So each rank sums the squares of what it holds, each
    gradient divided by the number of ranks that hold the same values, and one all-reduce gives the norm across shards
    and pipeline stages. `counted` are the parameters in the norm, if a copy must not count twice.
    """
    groups: dict[int, list[Tensor]] = defaultdict(list)
    for p in parameters if counted is None else counted:
        if p.grad is not None:
            groups[_num_shards(p.grad)].append(local(p.grad))
    if num_stages == 1 and set(groups) <= {1}:  # every rank holds everything
        return norm_of(groups[1])
    num_ranks = dist.get_world_size() // num_stages
    squares = [norm_of(g).square() * (n / num_ranks) for n, g in groups.items()]
    device = squares[0].device if squares else local(parameters[0]).device
    total = torch.stack(squares).sum() if squares else torch.zeros((), device=device)
    if counted is not None:  # an uncounted copy adds 0, or NaN: each copy is updated with its own gradient
        is_counted = {id(p) for p in counted}
        copies = [local(p.grad) for p in parameters if id(p) not in is_counted and p.grad is not None]
        total = total + 0.0 * norm_of(copies).square() if copies else total
    dist.all_reduce(total)
    return total.sqrt()


def norm_of(tensors: list[Tensor]) -> Tensor:
    """Return one norm over plain tensors, in fp32: torch's norm of bf16 tensors has three digits."""
    if all(t.dtype == torch.float32 for t in tensors):
        return nn.utils.get_total_norm(tensors)
    return torch.linalg.vector_norm(torch.stack(torch._foreach_norm(tensors, 2, dtype=torch.float32)))


def clip_factor(norm: Tensor, max_norm: float | None) -> Tensor | None:
    """Return the factor for gradients of this norm, so that the norm becomes at most `max_norm`."""
    return None if max_norm is None else torch.clamp(max_norm / (norm + 1e-6), max=1.0)


def scale_gradients(parameters: list[nn.Parameter], factor: Tensor | None) -> None:
    if factor is not None:
        torch._foreach_mul_([local(p.grad) for p in parameters if p.grad is not None], factor)


def _num_shards(gradient: Tensor) -> int:
    """Return over how many ranks the values are sharded; all other ranks of a stage hold copies."""
    if not is_dtensor(gradient):
        return 1
    dtensor: Any = gradient
    assert not any(p.is_partial() for p in dtensor.placements), "a partial sum has no norm"
    return math.prod(
        n for n, p in zip(dtensor.device_mesh.shape, dtensor.placements, strict=True) if not p.is_replicate()
    )
