"""All-reduce as a ring of send/recv: each rank sends only to the next one, and receives only from the one before it.

Each rank splits its values into n chunks, one for each of the n ranks. Chunk 2 on its way around 4 ranks:

    reduce-scatter   rank 2 ──► 3 ──► 0 ──► 1    each rank adds its own values: rank 1 has the sum of all
    all-gather       rank 1 ──► 2 ──► 3 ──► 0    each rank keeps a copy of the sum, and passes it on

All n chunks travel at the same time, each from another rank, so in every turn each link carries one chunk. There are
2 (n - 1) turns, and a rank sends 2 (n - 1) / n times its values: hardly more on a thousand ranks than on four. NCCL's
ring has the same turns, split into smaller pieces so that a rank forwards the start of a chunk while the rest arrives.

A chunk is summed in one order, by one rank after the other, and then copied: all ranks get the same bits.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from dtrain.util.collective import wait_for_peers

Trace = Callable[[dict[str, Any]], None]  # gets each message that this rank has exchanged


def all_reduce(values: Tensor, group: dist.ProcessGroup, trace: Trace | None = None) -> None:
    """Replace a flat tensor by its sum over the ranks of the group."""
    n, rank = dist.get_world_size(group), dist.get_rank(group)
    chunks = values.tensor_split(n)
    for turn in range(n - 1):
        sent, received = (rank - turn) % n, (rank - turn - 1) % n
        arrived = torch.empty_like(chunks[received])
        exchange("reduce-scatter", sent, chunks[sent], arrived, group, trace)
        chunks[received].add_(arrived)
    # now the sum of chunk rank + 1 is here
    for turn in range(n - 1):
        sent, received = (rank - turn + 1) % n, (rank - turn) % n
        exchange("all-gather", sent, chunks[sent], chunks[received], group, trace)


def exchange(
    phase: str, chunk: int, sent: Tensor, arrived: Tensor, group: dist.ProcessGroup, trace: Trace | None
) -> None:
    """Send to the next rank while receiving from the one before."""
    n, rank = dist.get_world_size(group), dist.get_rank(group)
    to, source = (dist.get_global_rank(group, peer % n) for peer in (rank + 1, rank - 1))
    start = time.time()
    both = [dist.P2POp(dist.isend, sent, to, group), dist.P2POp(dist.irecv, arrived, source, group)]
    wait_for_peers(dist.batch_isend_irecv(both))  # as a batch: NCCL would run one after the other, and all ranks wait
    if trace is not None:
        if sent.is_cuda:  # NCCL's wait() blocks the stream, not the host
            torch.cuda.synchronize(sent.device)
        message = {"rank": dist.get_rank(), "to": to, "from": source, "phase": phase, "chunk": chunk}
        trace(message | {"bytes": sent.nbytes, "start": start, "end": time.time()})
