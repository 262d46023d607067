"""GPT-2 (Radford et al., 2019): pre-norm transformer, learned positions, the head tied to the embedding.

A plain module. `model(tokens)` returns logits, `model(tokens, targets)` the mean loss. Head and loss are one call, so
they can become one fused op without changing any strategy. The methods at the end are the parallelism plans that only
the model can know.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from dtrain.models.layers import MLP, Attend, Context, Head, LayerNorm, attend, places, tokens_of, transformer_tp_plan

if TYPE_CHECKING:
    from torch.distributed.tensor.parallel import ParallelStyle


class Attention(nn.Module):
    def __init__(self, dim: int, num_heads: int, dropout: float) -> None:
        super().__init__()
        self.head_dim = dim // num_heads
        self.dropout = dropout
        # rows ordered head by head (q, k, v of head 0, ...), so that row-wise sharding keeps heads whole
        self.qkv = nn.Linear(dim, 3 * dim)
        self.proj = nn.Linear(dim, dim)

    def forward(self, x: Tensor, mask: Tensor | None = None, cached: Attend | None = None) -> Tensor:
        batch, length, _ = x.shape
        q, k, v = self.qkv(x).view(batch, length, -1, 3, self.head_dim).permute(3, 0, 2, 1, 4)
        if cached is not None:
            heads = cached(q, k, v, mask)
        else:
            heads = attend(q, k, v, mask, self.dropout if self.training else 0.0)
        out: Tensor = self.proj(heads)
        return out


class Block(nn.Module):
    def __init__(self, dim: int, num_heads: int, dropout: float) -> None:
        super().__init__()
        self.norm1 = LayerNorm(dim)
        self.attention = Attention(dim, num_heads, dropout)
        self.norm2 = LayerNorm(dim)
        self.mlp = MLP(dim, approximate="tanh")
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor, mask: Tensor | None = None, cached: Attend | None = None) -> Tensor:
        x = x + self.dropout(self.attention(self.norm1(x), mask=mask, cached=cached))
        return x + self.dropout(self.mlp(self.norm2(x)))


class GPT2(nn.Module):
    perplexity = True  # exp(loss) is meaningful
    stream = torch.float32  # dtype of the residual stream between blocks (precision.stream)

    def __init__(
        self,
        num_layers: int,
        dim: int,
        num_heads: int,
        vocab_size: int,
        seq_len: int,
        vocab_multiple: int = 128,
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        self.num_layers, self.dim, self.seq_len, self.vocab_size = num_layers, dim, seq_len, vocab_size
        padded = math.ceil(vocab_size / vocab_multiple) * vocab_multiple
        self.is_first = self.is_last = True  # of the pipeline; an unsplit model is both
        self.embed: nn.Embedding | None = nn.Embedding(padded, dim)
        self.positions: nn.Embedding | None = nn.Embedding(seq_len, dim)
        self.dropout = nn.Dropout(dropout)
        self.layers = nn.ModuleDict({str(i): Block(dim, num_heads, dropout) for i in range(num_layers)})
        self.norm: LayerNorm | None = LayerNorm(dim)
        self.head = Head()
        # as published: vocabulary padding is not counted
        self.num_parameters = sum(p.numel() for p in self.parameters()) - (padded - vocab_size) * dim

    def forward(
        self,
        inputs: Tensor,
        targets: Tensor | None = None,
        source: Tensor | None = None,
        cache: Context | None = None,
    ) -> Tensor:
        """Return logits, or with targets the mean loss, of tokens or packed documents (layers.places).

        `source`: the tokens, if `inputs` are an earlier stage's hidden states. With a `cache`, the tokens continue
        those in it, and are added to it. It may also divide the sequences over ranks (comm/context.py).
        """
        positions, mask = places(inputs if source is None else source, cache)
        x = inputs
        if self.is_first:
            x = self.embedded(tokens_of(inputs, cache), positions)
        for name, layer in self.layers.items():
            x = layer(x, mask=mask, cached=cache.of(name) if cache else None)
        if cache:
            cache.advance(inputs.shape[1])
        if not self.is_last:
            return x
        assert self.embed is not None and self.norm is not None
        # tied: no second matrix, and no tie for a wrapper to break
        out: Tensor = self.head(self.norm(x), self.embed.weight, targets)
        return out if targets is not None else out[..., : self.vocab_size]

    def embedded(self, tokens: Tensor, positions: Tensor) -> Tensor:
        assert self.embed is not None and self.positions is not None
        x: Tensor = self.dropout(self.embed(tokens).float() + self.positions(positions).float())
        return x.to(self.stream)

    # ---- the plans -------------------------------------------------------------------------------------------

    def init_weights(self, name: str, weight: Tensor, generator: torch.Generator) -> None:
        """Fill one full weight. Called per name with its own generator, so order and sharding do not matter."""
        if name.endswith("bias"):
            weight.zero_()
        elif "norm" in name:
            weight.fill_(1.0)
        else:
            into_residual = name.endswith(("proj.weight", "down.weight"))
            std = 0.02 / math.sqrt(2 * self.num_layers) if into_residual else 0.02
            weight.normal_(0.0, std, generator=generator)

    def fsdp_units(self) -> list[nn.Module]:
        """Return the modules gathered one at a time under fsdp; also the units of activation checkpointing."""
        return list(self.layers.values())

    def tp_plan(self, sequence_parallel: bool = False, loss_parallel: bool = False) -> dict[str, ParallelStyle]:
        """Return the tensor-parallel plan: heads and the MLP's width are sharded."""
        return transformer_tp_plan(
            self,
            columns=("attention.qkv", "mlp.up"),
            rows=("attention.proj", "mlp.down"),
            vocabulary=("embed",),
            sequence_parallel=sequence_parallel,
            loss_parallel=loss_parallel,
        )

    def pipeline_split(self, low: int, high: int) -> GPT2:
        """Keep the layers from `low` to before `high`, with the ends that belong to them, and drop the rest.

        Names stay. The tied weight is on both ends; a stage that is not the last ignores the targets.
        """
        for i in list(self.layers):
            if not low <= int(i) < high:
                del self.layers[i]
        self.is_first, self.is_last = low == 0, high == self.num_layers
        if not self.is_first:
            self.positions = None
        if not self.is_last:
            self.norm = None
        if not (self.is_first or self.is_last):
            self.embed = None
        return self

    def flops_per_sample(self) -> float:
        """FLOPs (forward, backward) of one sequence: 6 per parameter and token, 12·layers·dim·length for attention."""
        return self.seq_len * (6.0 * self.num_parameters + 12.0 * self.num_layers * self.dim * self.seq_len)
