"""The ring adds up, gives all ranks the same bits, and sends what its docstring says."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from dtrain.comm import ring
from tests.world import spawn


def sums_and_messages() -> None:
    n, rank = dist.get_world_size(), dist.get_rank()
    for length in (30, 31, 2):  # chunks of the same size, of two sizes, and an empty one
        own = [torch.randn(length, generator=torch.Generator().manual_seed(r)) for r in range(n)]
        values, messages = own[rank].clone(), list[dict[str, Any]]()
        ring.all_reduce(values, dist.group.WORLD, messages.append)
        torch.testing.assert_close(values, torch.stack(own).sum(0))
        everywhere = [torch.empty_like(values) for _ in range(n)]
        dist.all_gather(everywhere, values)
        assert all(torch.equal(values, other) for other in everywhere)

        assert [m["phase"] for m in messages] == ["reduce-scatter"] * (n - 1) + ["all-gather"] * (n - 1)
        assert {(m["rank"], m["to"], m["from"]) for m in messages} == {(rank, (rank + 1) % n, (rank - 1) % n)}
        assert all(m["start"] <= m["end"] for m in messages)
        sent = [0] * n
        dist.all_gather_object(sent, sum(m["bytes"] for m in messages))
        assert sum(sent) == n * 2 * (n - 1) / n * 4 * length
        firsts = [0] * n
        dist.all_gather_object(firsts, messages[0]["chunk"])
        assert firsts == list(range(n)), "every link carries another chunk at the same time"


def test_sums_and_messages() -> None:
    spawn(3, sums_and_messages)
