"""Context parallel: the ranks of a group each compute a part of every sequence, and attention sees all of it.

A `Sequences` object is passed to the model as its `cache`: it selects this rank's tokens, knows their positions, and
computes attention together with the other ranks. Everything else in a transformer treats tokens one by one.

ring and allgather are causal, so later tokens have more work. Each rank has two chunks, one from the start and one from
the end (zig-zag), of 4 ranks:     chunk 0 1 2 3 4 5 6 7
                                   rank  0 1 2 3 3 2 1 0

- ring: keys and values travel around the ranks, and each rank adds what it sees of them (kernels/block_attention.py).
  In the backward pass they travel again, together with the sums of their gradients, which end where they belong.
- allgather: each rank gathers all keys and values, forward and again backward; their gradients are reduce-scattered.
- ulysses: an all-to-all gives each rank all tokens of some heads, and another one brings the result back.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from dtrain.errors import bad
from dtrain.kernels import block_attention
from dtrain.models.layers import Attend, attend, documents, is_packed
from dtrain.util import late_dynamo
from dtrain.util.collective import wait_for_peers

Kind = Literal["ring", "allgather", "ulysses"]
KEYS, SUMS = 1, 2  # tags of messages


class Sequences:
    """This rank's part of each sequence, and attention over the parts of all ranks (models.layers.Context)."""

    def __init__(self, group: dist.ProcessGroup, kind: Kind) -> None:
        self.group, self.kind = group, kind
        self.size, self.rank = dist.get_world_size(group), dist.get_rank(group)
        self.orders: dict[tuple[int, torch.device], Tensor] = {}

    def order(self, length: int, device: torch.device) -> Tensor:
        """Return the positions of all tokens, rank after rank; those of a rank ascend."""
        if (length, device) not in self.orders:
            unit = self.size if self.kind == "ulysses" else 2 * self.size
            if length % unit:  # of a user's own data: those of dtrain's are checked before the launch
                rule = f"sequences have {length} tokens, not a multiple of {unit} (strategy.cp_kind={self.kind})"
                raise bad("strategy.cp", self.size, rule, "another length, or strategy.cp=1")
            places = torch.arange(length, device=device)
            if self.kind != "ulysses":
                chunks = places.chunk(2 * self.size)
                places = torch.cat([c for r in range(self.size) for c in (chunks[r], chunks[2 * self.size - 1 - r])])
            self.orders[length, device] = places
        return self.orders[length, device]

    def tokens(self, tokens: Tensor) -> Tensor:
        """Return this rank's part of a tensor [batch, length, …]."""
        return self.parts(tokens)[self.rank]

    def parts(self, tokens: Tensor) -> tuple[Tensor, ...]:
        """Return each rank's part of a tensor [batch, length, …]."""
        return tokens.index_select(1, self.order(tokens.shape[1], tokens.device)).chunk(self.size, dim=1)

    def whole(self, part: Tensor) -> Tensor:
        """Return the tensor [batch, length, …] of which each rank has its part; not differentiable."""
        found = torch.cat(list(gathered(part, self.group)), dim=1)
        return found.index_select(1, self.order(found.shape[1], found.device).argsort())

    def places(self, inputs: Tensor) -> tuple[Tensor, Tensor | None]:
        """Return the positions of this rank's tokens and, in place of a mask, the documents of all tokens."""
        if is_packed(inputs):
            return self.tokens(inputs[..., 1]), documents(inputs)
        return self.order(inputs.shape[1], inputs.device).chunk(self.size)[self.rank], None

    def of(self, layer: str) -> Attend:
        return self.attend

    def advance(self, count: int) -> None:
        """Nothing is kept."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor, documents: Tensor | None) -> Tensor:
        """Causal attention of this rank's queries [batch, heads, tokens, head_dim]; return [batch, tokens, dim]."""
        return _attend(self, q, k, v, documents)


def _attend(sequences: Sequences, q: Tensor, k: Tensor, v: Tensor, documents: Tensor | None) -> Tensor:
    device = q.device.type
    if torch.is_autocast_enabled(device):
        q, k, v = (x.to(torch.get_autocast_dtype(device)) for x in (q, k, v))
    with torch.autocast(device, enabled=False):
        if sequences.kind == "ulysses":
            q, k, v = (ExchangeHeads.apply(x, sequences.group, True) for x in (q, k, v))
            mask = None if documents is None else same(documents, documents).tril()
            found = attend(q, k, v, mask).unflatten(2, (-1, q.shape[3])).transpose(1, 2)
            out = ExchangeHeads.apply(found, sequences.group, False).transpose(1, 2)
        else:
            out = BlockByBlock.apply(q, k, v, documents, sequences)
    flat: Tensor = out.flatten(2)
    return flat


late_dynamo.shield(globals(), "_attend")  # graph break: collectives


def same(a: Tensor, b: Tensor) -> Tensor:
    """Return the mask of tokens [batch, queries] and [batch, keys] in the same document."""
    return (a[:, :, None] == b[:, None, :])[:, None]


# ---- ring and allgather ----------------------------------------------------------------------------------------


class BlockByBlock(torch.autograd.Function):
    """Attention of this rank's queries to the keys of one rank after the other; returns [batch, tokens, heads, dim]."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, documents: Tensor | None, sequences: Sequences) -> Tensor:
        both = torch.stack([k, v])
        out = total = torch.empty(0)
        for source, (k, v) in keys_and_values(both, sequences):
            rows, columns, is_causal, mask = block(source, q.shape[2], documents, sequences)
            found = block_attention.attention(q[:, :, rows], k[:, :, columns], v[:, :, columns], is_causal, mask)
            if source == sequences.rank:  # the first: each query sees at least itself
                out, total = found
            else:
                out[:, :, rows], total[:, :, rows] = block_attention.merge(out[:, :, rows], total[:, :, rows], *found)
        result = out.transpose(1, 2).to(q.dtype).contiguous()
        ctx.save_for_backward(q, both, result, total, documents)
        ctx.sequences = sequences
        return result

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_out: Tensor) -> tuple[Tensor | None, ...]:
        q, both, out, total, documents = ctx.saved_tensors
        sequences: Sequences = ctx.sequences
        d_out, out = d_out.transpose(1, 2), out.transpose(1, 2)
        dq = torch.zeros(q.shape, dtype=torch.float32, device=q.device)
        sums = (RingSums if sequences.kind == "ring" else ScatteredSums)(both, sequences)
        for source, (k, v) in keys_and_values(both, sequences):
            rows, columns, is_causal, mask = block(source, q.shape[2], documents, sequences)
            of_q, of_k, of_v = block_attention.gradients(
                d_out[:, :, rows], q[:, :, rows], k[:, :, columns], v[:, :, columns], out[:, :, rows],
                total[:, :, rows], is_causal, mask,
            )  # fmt: skip
            dq[:, :, rows] += of_q
            found = torch.zeros(both.shape, dtype=torch.float32, device=q.device)
            found[0][:, :, columns], found[1][:, :, columns] = of_k, of_v
            sums.add(source, found)
        dk, dv = sums.own().to(q.dtype)
        return dq.to(q.dtype), dk, dv, None, None


def block(
    source: int, length: int, documents: Tensor | None, sequences: Sequences
) -> tuple[slice, slice, bool, Tensor | None]:
    """Return which queries of this rank see which keys of another one: rows, columns, whether causal, and the mask.

    Of both ranks' chunks, the keys of an earlier rank's first chunk come before all queries here, and its second chunk
    after them; all keys of a later rank come between the two chunks here.
    """
    every, half = slice(None), length // 2
    rows = slice(half, None) if source > sequences.rank else every
    columns = slice(half) if source < sequences.rank else every
    mask = None
    if documents is not None:
        parts = sequences.parts(documents)
        mask = same(parts[sequences.rank][:, rows], parts[source][:, columns])
    return rows, columns, source == sequences.rank, mask


def keys_and_values(own: Tensor, sequences: Sequences) -> Iterator[tuple[int, Tensor]]:
    """Yield keys and values with the rank that they come from, beginning with this one."""
    n, rank = sequences.size, sequences.rank
    if sequences.kind == "allgather":
        found = gathered(own, sequences.group)
        yield from (((rank - turn) % n, found[(rank - turn) % n]) for turn in range(n))
        return
    for turn in range(n):
        is_last = turn == n - 1
        works, arriving = ([], own) if is_last else passed_on(own, sequences, KEYS)  # while this block is computed
        yield (rank - turn) % n, own
        wait_for_peers(works)
        own = arriving


class RingSums:
    """Gradients of keys and values follow them: each rank adds its own, and the last step brings them home."""

    def __init__(self, own: Tensor, sequences: Sequences) -> None:
        self.sequences, self.works = sequences, list[Any]()
        self.sums = self.arriving = own  # replaced by the first `add`

    def add(self, source: int, found: Tensor) -> None:
        if self.works:
            found += self.own()
        self.sums = found  # being sent
        self.works, self.arriving = passed_on(found, self.sequences, SUMS)

    def own(self) -> Tensor:
        wait_for_peers(self.works)
        return self.arriving


class ScatteredSums:
    """Gradients of all ranks' keys and values: reduce-scattered at the end."""

    def __init__(self, own: Tensor, sequences: Sequences) -> None:
        shape = (sequences.size, *own.shape)
        self.sums, self.group = torch.empty(shape, dtype=torch.float32, device=own.device), sequences.group

    def add(self, source: int, found: Tensor) -> None:
        self.sums[source] = found

    def own(self) -> Tensor:
        out = torch.empty_like(self.sums[0])
        dist.reduce_scatter_tensor(out, self.sums.flatten(0, 1), group=self.group)
        return out


# ---- messages ----------------------------------------------------------------------------------------------------


def passed_on(sent: Tensor, sequences: Sequences, tag: int) -> tuple[list[Any], Tensor]:
    """Start to send to the next rank, and to receive from the one before; return what to wait for and what arrives."""
    group, arriving = sequences.group, torch.empty_like(sent)
    to, source = (dist.get_global_rank(group, (sequences.rank + hop) % sequences.size) for hop in (1, -1))
    both = [dist.P2POp(dist.isend, sent, to, group, tag), dist.P2POp(dist.irecv, arriving, source, group, tag)]
    return list(dist.batch_isend_irecv(both)), arriving


def gathered(own: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Return all ranks' tensors, stacked."""
    found = own.new_empty((dist.get_world_size(group), *own.shape))
    dist.all_gather_into_tensor(found.flatten(0, 1), own.contiguous(), group=group)
    return found


class ExchangeHeads(torch.autograd.Function):
    """All-to-all: from some tokens of all heads to all tokens of some heads [batch, heads, tokens, dim], or back."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup, to_heads: bool) -> Tensor:
        ctx.group, ctx.to_heads = group, to_heads
        return exchange_heads(x, group, to_heads)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        return exchange_heads(gradient, ctx.group, not ctx.to_heads), None, None


def exchange_heads(x: Tensor, group: dist.ProcessGroup, to_heads: bool) -> Tensor:
    cut, joined = (1, 2) if to_heads else (2, 1)
    sent = torch.stack(x.chunk(dist.get_world_size(group), dim=cut))
    arrived = torch.empty_like(sent)
    dist.all_to_all_single(arrived, sent, group=group)
    return torch.cat(list(arrived), dim=joined)
