"""Modules that models share. Norms compute in fp32 in every precision; head and loss are one call."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from dtrain.kernels import document_attention
from dtrain.kernels.block_attention import repeat_heads
from dtrain.kernels.cross_entropy import IGNORED as IGNORED
from dtrain.kernels.cross_entropy import linear_cross_entropy
from dtrain.kernels.gelu import can_fuse, gelu, linear_gelu

if TYPE_CHECKING:
    from torch.distributed.tensor.parallel import ParallelStyle


class LayerNorm(nn.LayerNorm):
    """LayerNorm in fp32 in every precision, even if fsdp has gathered 16-bit weights; under fp32 the casts do nothing.

    The output has the dtype of the residual stream: the following matmul would round it anyway.
    """

    def forward(self, x: Tensor) -> Tensor:
        out = F.layer_norm(x.float(), self.normalized_shape, self.weight.float(), self.bias.float(), self.eps)
        return out.to(x.dtype)


class RMSNorm(nn.RMSNorm):
    """RMSNorm in fp32 in every precision, like LayerNorm."""

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x.float(), self.normalized_shape, self.weight.float(), self.eps).to(x.dtype)


class MLP(nn.Module):
    """Two linear layers, the inner one four times as wide, with a GELU between: exact, or the tanh approximation."""

    fuses = True  # fuse GELU with the bias before it (kernels/gelu.py); False if the layer is recomputed

    def __init__(self, dim: int, approximate: str = "none") -> None:
        super().__init__()
        self.approximate = approximate
        self.up = nn.Linear(dim, 4 * dim)
        self.down = nn.Linear(4 * dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        if self.fuses and torch.compiler.is_compiling() and can_fuse(self.up, x):
            x = linear_gelu(x, self.up.weight, self.up.bias, self.approximate)
        else:
            x = gelu(self.up(x), self.approximate)
        return self.down(x)


class Head(nn.Module):
    """Logits, or the mean loss, from the last hidden states and a matrix. A module, so that a plan can name it."""

    # compute the loss without full logits (kernels/cross_entropy.py); None: on a GPU, where it is faster
    fused: bool | None = None

    def is_fused(self, x: Tensor) -> bool:
        return x.is_cuda if self.fused is None else self.fused

    def forward(self, x: Tensor, weight: Tensor, targets: Tensor | None = None) -> Tensor:
        if targets is not None and self.is_fused(x):
            return linear_cross_entropy(x, weight, targets)
        logits = F.linear(x, weight)
        return logits if targets is None else F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())


CLASSIFY_METRICS = ("accuracy", "top5")  # what `classify` returns after the loss


def eval_metrics(of: Any) -> tuple[str, ...]:
    """Return the names of the metrics that a model or a loss returns after the loss in evaluation; () if none."""
    return tuple(getattr(of, "eval_metrics", getattr(of, "figures", ())))  # figures: the former name


def classify(logits: Tensor, targets: Tensor, training: bool) -> Tensor:
    """Return the mean loss over the targets that count; in evaluation also accuracy and top-5 accuracy.

    `logits` has one more dimension than `targets`. With at most 5 classes, top-5 accuracy is always 1: it is NaN
    instead, and not reported (train/metrics.py).
    """
    logits, targets = logits.reshape(-1, logits.shape[-1]).float(), targets.reshape(-1)
    loss = F.cross_entropy(logits, targets)
    if training:
        return loss
    best = logits.topk(min(5, logits.shape[-1])).indices == targets[:, None]  # an ignored target equals no class
    count = (targets != IGNORED).sum()
    top5 = best.any(dim=1).sum() / count if logits.shape[-1] > 5 else torch.full_like(loss, torch.nan)
    return torch.stack([loss, best[:, 0].sum() / count, top5])


# ---- attention of language models ----------------------------------------------------------------------------


Attend = Callable[[Tensor, Tensor, Tensor, Tensor | None], Tensor]  # attention of one layer: q, k, v, mask


class Context(Protocol):
    """What attention sees besides the tokens of this call: a KV cache, or the other ranks' parts of the sequences."""

    def tokens(self, tokens: Tensor) -> Tensor:
        """Return those of the tokens [batch, length] that this rank computes."""

    def places(self, inputs: Tensor) -> tuple[Tensor, Tensor | None]:
        """Return positions of these tokens, and the mask that the attention of each layer gets; see `places`."""

    def of(self, layer: str) -> Attend:
        """Return the attention of one layer."""

    def advance(self, count: int) -> None:
        """After all layers have seen `count` tokens."""


class Cache:
    """KV cache for generation: the next token costs one token, not all of them.

    Memory for `capacity` tokens is allocated at once, at a layer's first tokens.
    """

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.length = 0  # tokens in it; the model calls `advance` after all its layers
        self.kept: dict[str, tuple[Tensor, Tensor]] = {}

    def tokens(self, tokens: Tensor) -> Tensor:
        return tokens

    def places(self, tokens: Tensor) -> tuple[Tensor, Tensor | None]:
        """Return positions and mask of tokens [batch, length] that continue those in it; see `places`."""
        assert not is_packed(tokens), "packed documents are for training"
        start, length = self.length, tokens.shape[1]
        positions = torch.arange(start, start + length, device=tokens.device)
        if start == 0 or length == 1:
            return positions, None
        return positions, positions[:, None] >= torch.arange(start + length, device=tokens.device)

    def of(self, layer: str) -> Attend:
        """Return the attention of one layer, which adds the new keys and values."""
        return functools.partial(self.attend, layer)

    def attend(self, layer: str, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        return attend(q, *self.extend(layer, k, v), mask)

    def advance(self, count: int) -> None:
        self.length += count

    def extend(self, layer: str, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Add [batch, heads, length, head_dim] of new tokens; return those of all tokens."""
        end = self.length + keys.shape[2]
        assert end <= self.capacity, f"{end} tokens exceed the KV cache's capacity of {self.capacity}"
        if layer not in self.kept:
            shape = (*keys.shape[:2], self.capacity, keys.shape[3])
            self.kept[layer] = keys.new_empty(shape), values.new_empty(shape)
        kept_keys, kept_values = self.kept[layer]
        kept_keys[:, :, self.length : end] = keys
        kept_values[:, :, self.length : end] = values
        return kept_keys[:, :, :end], kept_values[:, :, :end]

    def clear(self) -> None:
        """Restart in the same memory."""
        self.length = 0


def is_packed(inputs: Tensor) -> bool:
    """Return whether each token has its position in its document beside it. Hidden states are 3-D, too."""
    return inputs.ndim == 3 and not inputs.is_floating_point()


def tokens_of(inputs: Tensor, context: Context | None = None) -> Tensor:
    """Return the tokens [batch, length] to embed, without the positions that packed documents have beside them."""
    tokens = inputs[..., 0] if is_packed(inputs) else inputs
    return tokens if context is None else context.tokens(tokens)


def places(inputs: Tensor, context: Context | None = None) -> tuple[Tensor, Tensor | None]:
    """Return (positions, mask) of tokens [batch, length], or of packed documents [batch, length, 2].

    Positions are [length] or, if packed, [batch, length]. The mask is true where a query (row) sees a key, or, on a
    GPU, has the number of each token's document [batch, length]. It is None if plain causal attention is enough.
    """
    if context is not None:
        return context.places(inputs)
    if is_packed(inputs):
        document = documents(inputs)
        if inputs.is_cuda:
            return inputs[..., 1], document
        return inputs[..., 1], same_document(document)
    return torch.arange(inputs.shape[1], device=inputs.device), None


def documents(inputs: Tensor) -> Tensor:
    """Number the documents of packed sequences: [batch, length, 2] to [batch, length]."""
    return (inputs[..., 1] == 0).cumsum(dim=1)


def same_document(document: Tensor) -> Tensor:
    """Return which tokens [batch, 1, queries, keys] each query sees: those of its document up to itself."""
    return (document[:, :, None] == document[:, None, :]).tril()[:, None]


def attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None, dropout: float = 0.0) -> Tensor:
    """Causal or masked attention of [batch, heads, length, head_dim]; return [batch, length, dim].

    There may be fewer key and value heads than query heads: neighbours then share one. The queries may be one token
    after a cache, which sees all keys. `mask`: as `places` gives it.
    """
    if mask is not None and mask.dtype == torch.int64:
        if dropout == 0.0 and document_attention.supports(q):
            return document_attention.attention(q, k, v, mask).transpose(1, 2).flatten(2)
        mask = same_document(mask)
    if mask is not None:  # on a GPU only the kernel without a mask supports shared heads
        k, v = repeat_heads(k, q), repeat_heads(v, q)
    out = F.scaled_dot_product_attention(
        q, k, v, mask, dropout, is_causal=mask is None and q.shape[2] > 1, enable_gqa=q.shape[1] != k.shape[1]
    )
    return out.transpose(1, 2).flatten(2)


# ---- the tensor-parallel plan of a transformer with one stream -----------------------------------------------


def transformer_tp_plan(
    model: nn.Module,
    columns: Iterable[str],
    rows: Iterable[str],
    vocabulary: Iterable[str],
    sequence_parallel: bool,
    loss_parallel: bool,
) -> dict[str, ParallelStyle]:
    """Return the tensor-parallel style of each module that this (stage of a) language model has.

    Each block's matrices are sharded, `columns` by their outputs and `rows` by their inputs: two all-reduces per block
    and direction. Sequence parallel also shards the activations between them (norms, dropout, the residual stream)
    along the sequence: each all-reduce becomes an all-gather and a reduce-scatter. Loss parallel shards `vocabulary`
    (embedding and head) by tokens, so that no rank ever has full logits.

    The model has `layers` of norm1, attention, norm2 and mlp, `dropout` after the embedding, `norm` and `head`.
    """
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        PrepareModuleInput,
        PrepareModuleInputOutput,
        PrepareModuleOutput,
        RowwiseParallel,
        SequenceParallel,
    )

    between = Shard(1) if sequence_parallel else Replicate()
    plan: dict[str, ParallelStyle] = {}
    layers: nn.ModuleDict = model.layers  # type: ignore[assignment]
    for i in layers:
        block = f"layers.{i}"
        for norm, module in (("norm1", "attention"), ("norm2", "mlp")):
            if sequence_parallel:
                plan[f"{block}.{norm}"] = SequenceParallel()
            # q, k and v, or gate and up, get one DTensor, so its gradient needs one all-reduce
            plan[f"{block}.{module}"] = PrepareModuleInput(input_layouts=between, desired_input_layouts=Replicate())
        plan |= {f"{block}.{name}": ColwiseParallel() for name in columns}
        plan |= {f"{block}.{name}": RowwiseParallel(output_layouts=between) for name in rows}
    for name in vocabulary if loss_parallel else ():
        if isinstance(getattr(model, name), nn.Embedding):
            plan[name] = RowwiseParallel(input_layouts=Replicate(), output_layouts=Replicate())
        elif getattr(model, name) is not None:
            plan[name] = ColwiseParallel()  # only for its weight, which is passed to the head
    if model.is_first and sequence_parallel:
        plan["dropout"] = PrepareModuleOutput(output_layouts=Replicate(), desired_output_layouts=Shard(1))
    if model.is_last and sequence_parallel:
        plan["norm"] = SequenceParallel()
    if model.is_last and (sequence_parallel or loss_parallel):
        plan["head"] = PrepareModuleInputOutput(
            input_layouts=(between, None, None),
            desired_input_layouts=(Replicate(), None, None),
            use_local_input=not loss_parallel,
            output_layouts=Replicate(),
            desired_output_layouts=Replicate(),
        )
    return plan
