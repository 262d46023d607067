"""Context parallel: the ranks of a group each compute a part of every sequence, and attention sees all of it.

A `Sequences` object is passed to the model as its `cache`: it selects this rank's tokens, knows their positions, and
computes attention together with the other ranks. Everything else in a transformer treats tokens one by one.

ring and allgather are causal, so later tokens have more work. Each rank has two chunks, one from the start and one from
the end (zig-zag), of 4 ranks:     chunk 0 1 2 3 4 5 6 7
                                   rank  0 1 2 3 3 2 1 0

- ring: each rank sends keys and values to the next one, and attends to those that it receives, until they were on every
  rank (kernels/block_attention.py). In the backward pass they go round again, followed by their gradients, to which
  each rank adds its part; the last send returns these to the rank that owns the keys and values.
- allgather: each rank gathers all keys and values, forward and again backward; their gradients are reduce-scattered.
- ulysses: an all-to-all gives each rank all tokens of some heads, and another one brings the result back.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from dtrain.errors import bad
from dtrain.kernels import block_attention
from dtrain.models.layers import Attend, attend, documents, is_packed, same_document
from dtrain.util import late_dynamo
from dtrain.util.collective import wait_for_peers

Kind = Literal["ring", "allgather", "ulysses"]
KEYS_VALUES, GRADIENTS = 1, 2  # tags of send/recv


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
            positions = torch.arange(length, device=device)
            if self.kind != "ulysses":
                chunks = positions.chunk(2 * self.size)
                positions = torch.cat([c for r in range(self.size) for c in (chunks[r], chunks[2 * self.size - 1 - r])])
            self.orders[length, device] = positions
        return self.orders[length, device]

    def tokens(self, tokens: Tensor) -> Tensor:
        """Return this rank's part of a tensor [batch, length, …]."""
        return self.parts(tokens)[self.rank]

    def parts(self, tokens: Tensor) -> tuple[Tensor, ...]:
        """Return each rank's part of a tensor [batch, length, …]."""
        return tokens.index_select(1, self.order(tokens.shape[1], tokens.device)).chunk(self.size, dim=1)

    def whole(self, part: Tensor) -> Tensor:
        """Return the tensor [batch, length, …] of which each rank has its part; not differentiable."""
        parts = torch.cat(list(all_gather(part, self.group)), dim=1)
        return parts.index_select(1, self.order(parts.shape[1], parts.device).argsort())

    def places(self, inputs: Tensor) -> tuple[Tensor, Tensor | None]:
        """Return the positions of this rank's tokens and, of packed documents, what `attend` gets in place of a mask.

        ulysses without a kernel for documents: the mask of whole sequences, as values to add, once for all layers.
        Else the documents of all tokens.
        """
        if not is_packed(inputs):
            return self.order(inputs.shape[1], inputs.device).chunk(self.size)[self.rank], None
        positions = self.tokens(inputs[..., 1])
        # in 16 bits a GPU has a kernel (kernels/document_attention.py)
        as_values = self.kind == "ulysses" and not (inputs.is_cuda and torch.is_autocast_enabled("cuda"))
        return positions, additive_mask(inputs) if as_values else documents(inputs)

    def of(self, layer: str) -> Attend:
        return self.attend

    def advance(self, count: int) -> None:
        """Nothing is kept."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        """Causal attention of this rank's queries [batch, heads, tokens, head_dim]; return [batch, tokens, dim].

        mask: from `places`.
        """
        return _attend(self, q, k, v, mask)


def _attend(sequences: Sequences, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
    device = q.device.type
    if torch.is_autocast_enabled(device):
        q, k, v = (x.to(torch.get_autocast_dtype(device)) for x in (q, k, v))
    with torch.autocast(device, enabled=False):
        if sequences.kind == "ulysses":
            q, k, v = (ExchangeHeads.apply(x, sequences.group, True) for x in (q, k, v))
            of_heads = attend(q, k, v, mask).unflatten(2, (-1, q.shape[3])).transpose(1, 2)
            out = ExchangeHeads.apply(of_heads, sequences.group, False).transpose(1, 2)
        else:
            out = BlockByBlock.apply(q, k, v, mask, sequences)
    flat: Tensor = out.flatten(2)
    return flat


late_dynamo.shield(globals(), "_attend")  # graph break: collectives


def additive_mask(inputs: Tensor) -> Tensor:
    """Return the mask of packed documents in the dtype of attention: -inf where a query does not see a key."""
    device = inputs.device.type
    dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else torch.float32
    mask = same_document(documents(inputs))
    return torch.zeros(mask.shape, dtype=dtype, device=inputs.device).masked_fill_(~mask, -math.inf)


# ---- ring and allgather ----------------------------------------------------------------------------------------


class BlockByBlock(torch.autograd.Function):
    """Attention of this rank's queries to the keys of one rank after the other; returns [batch, tokens, heads, dim]."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, documents: Tensor | None, sequences: Sequences) -> Tensor:
        own = torch.stack([k, v])
        out = lse = torch.empty(0)
        for source, (k, v) in keys_and_values(own, sequences):
            rows, columns, is_causal, pair = block(source, q.shape[2], documents, sequences)
            part = block_attention.attention(q[:, :, rows], k[:, :, columns], v[:, :, columns], is_causal, pair)
            if source == sequences.rank:  # the first: each query sees at least itself
                out, lse = part
            else:
                out[:, :, rows], lse[:, :, rows] = block_attention.merge(out[:, :, rows], lse[:, :, rows], *part)
        result = out.transpose(1, 2).to(q.dtype).contiguous()
        ctx.save_for_backward(q, own, result, lse, documents)
        ctx.sequences = sequences
        return result

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_out: Tensor) -> tuple[Tensor | None, ...]:
        q, own, out, lse, documents = ctx.saved_tensors
        sequences: Sequences = ctx.sequences
        d_out, out = d_out.transpose(1, 2), out.transpose(1, 2)
        dq = torch.zeros(q.shape, dtype=torch.float32, device=q.device)
        of_keys_values = (RingGradients if sequences.kind == "ring" else ScatteredGradients)(own, sequences)

        def add(source: int, k: Tensor, v: Tensor) -> None:  # what it computes is freed when it returns
            rows, columns, is_causal, pair = block(source, q.shape[2], documents, sequences)
            d_rows, d_keys, d_values = block_attention.gradients(
                d_out[:, :, rows], q[:, :, rows], k[:, :, columns], v[:, :, columns], out[:, :, rows],
                lse[:, :, rows], is_causal, pair,
            )  # fmt: skip
            dq[:, :, rows] += d_rows
            of_keys_values.add(source, columns, d_keys, d_values)

        for source, (k, v) in keys_and_values(own, sequences):
            add(source, k, v)
        dk, dv = of_keys_values.own().to(q.dtype)
        return dq.to(q.dtype), dk, dv, None, None


def block(
    source: int, length: int, documents: Tensor | None, sequences: Sequences
) -> tuple[slice, slice, bool, block_attention.Documents]:
    """Return which queries of this rank see which keys of another: rows, columns, whether causal, documents of both.

    Of both ranks' chunks, the keys of an earlier rank's first chunk come before all queries here, and its second chunk
    after them; all keys of a later rank come between the two chunks here.
    """
    every, half = slice(None), length // 2
    rows = slice(half, None) if source > sequences.rank else every
    columns = slice(half) if source < sequences.rank else every
    pair = None
    if documents is not None:
        parts = sequences.parts(documents)
        pair = parts[sequences.rank][:, rows], parts[source][:, columns]
    return rows, columns, source == sequences.rank, pair


def keys_and_values(own: Tensor, sequences: Sequences) -> Iterator[tuple[int, Tensor]]:
    """Yield keys and values with the rank that they come from, beginning with this one."""
    n, rank = sequences.size, sequences.rank
    if sequences.kind == "allgather":
        of_ranks = all_gather(own, sequences.group)
        yield from (((rank - turn) % n, of_ranks[(rank - turn) % n]) for turn in range(n))
        return
    for turn in range(n):
        is_last = turn == n - 1
        works, received = ([], own) if is_last else start_shift(own, sequences, KEYS_VALUES)  # while this is computed
        yield (rank - turn) % n, own
        wait_for_peers(works)
        own = received


class RingGradients:
    """Gradients of keys and values, which follow them: each rank adds its part, and the last send brings them home."""

    def __init__(self, own: Tensor, sequences: Sequences) -> None:
        self.sequences, self.works = sequences, list[Any]()
        self.sent = self.received = torch.zeros(own.shape, dtype=torch.float32, device=own.device)

    def add(self, source: int, columns: slice, d_keys: Tensor, d_values: Tensor) -> None:
        self.sent = self.own()
        for total, part in zip(self.sent, (d_keys, d_values), strict=True):
            total[:, :, columns] += part
        self.works, self.received = start_shift(self.sent, self.sequences, GRADIENTS)

    def own(self) -> Tensor:
        wait_for_peers(self.works)
        return self.received


class ScatteredGradients:
    """Gradients of all ranks' keys and values: reduce-scattered at the end."""

    def __init__(self, own: Tensor, sequences: Sequences) -> None:
        shape = (sequences.size, *own.shape)
        self.parts, self.group = torch.zeros(shape, dtype=torch.float32, device=own.device), sequences.group

    def add(self, source: int, columns: slice, d_keys: Tensor, d_values: Tensor) -> None:
        for part, gradient in zip(self.parts[source], (d_keys, d_values), strict=True):
            part[:, :, columns] = gradient

    def own(self) -> Tensor:
        out = torch.empty_like(self.parts[0])
        dist.reduce_scatter_tensor(out, self.parts.flatten(0, 1), group=self.group)
        return out


# ---- collectives -------------------------------------------------------------------------------------------------


def start_shift(sent: Tensor, sequences: Sequences, tag: int) -> tuple[list[Any], Tensor]:
    """Start to send to the next rank, and to receive from the one before; return what to wait for, and what arrives."""
    group, received = sequences.group, torch.empty_like(sent)
    to, source = (dist.get_global_rank(group, (sequences.rank + hop) % sequences.size) for hop in (1, -1))
    ops = [dist.P2POp(dist.isend, sent, to, group, tag), dist.P2POp(dist.irecv, received, source, group, tag)]
    return list(dist.batch_isend_irecv(ops)), received


def all_gather(own: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Return all ranks' tensors, stacked."""
    stacked = own.new_empty((dist.get_world_size(group), *own.shape))
    dist.all_gather_into_tensor(stacked.flatten(0, 1), own.contiguous(), group=group)
    return stacked


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
    split_dim, joined_dim = (1, 2) if to_heads else (2, 1)
    sent = torch.stack(x.chunk(dist.get_world_size(group), dim=split_dim))
    received = torch.empty_like(sent)
    dist.all_to_all_single(received, sent, group=group)
    return torch.cat(list(received), dim=joined_dim)
