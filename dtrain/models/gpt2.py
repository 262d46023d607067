"""GPT-2 (Radford et al., 2019): pre-norm transformer, learned positions, the head tied to the embedding.

A plain module. `model(tokens)` gives logits, `model(tokens, targets)` the mean loss: head and loss lie behind one
call, so they can become one fused operation without any strategy noticing. The methods at the end are the plans
that only the model can know.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.nn import functional as F

if TYPE_CHECKING:
    from torch.distributed.tensor.parallel import ParallelStyle


class LayerNorm(nn.LayerNorm):
    """In float32 in every precision, also where fsdp has gathered 16-bit weights; in fp32 the casts do nothing."""

    def forward(self, x: Tensor) -> Tensor:
        return F.layer_norm(x.float(), self.normalized_shape, self.weight.float(), self.bias.float(), self.eps)


class Attention(nn.Module):
    def __init__(self, dim: int, num_heads: int, dropout: float) -> None:
        super().__init__()
        self.head_dim = dim // num_heads
        self.dropout = dropout
        self.qkv = nn.Linear(
            dim, 3 * dim
        )  # rows ordered head by head (q, k, v of head 0, ...): a cut by rows keeps heads whole
        self.proj = nn.Linear(dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, _ = x.shape
        q, k, v = self.qkv(x).view(batch, length, -1, 3, self.head_dim).permute(3, 0, 2, 1, 4)
        dropout = self.dropout if self.training else 0.0
        out = F.scaled_dot_product_attention(q, k, v, dropout_p=dropout, is_causal=True)
        return self.proj(out.transpose(1, 2).flatten(2))


class MLP(nn.Module):
    def __init__(self, dim: int) -> None:
        super().__init__()
        self.up = nn.Linear(dim, 4 * dim)
        self.down = nn.Linear(4 * dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(x), approximate="tanh"))


class Block(nn.Module):
    def __init__(self, dim: int, num_heads: int, dropout: float) -> None:
        super().__init__()
        self.norm1 = LayerNorm(dim)
        self.attention = Attention(dim, num_heads, dropout)
        self.norm2 = LayerNorm(dim)
        self.mlp = MLP(dim)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.dropout(self.attention(self.norm1(x)))
        return x + self.dropout(self.mlp(self.norm2(x)))


class GPT2(nn.Module):
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
        self.is_first = self.is_last = True  # of the pipeline; a whole model is both
        self.embed: nn.Embedding | None = nn.Embedding(padded, dim)
        self.positions: nn.Embedding | None = nn.Embedding(seq_len, dim)
        self.dropout = nn.Dropout(dropout)
        self.layers = nn.ModuleDict({str(i): Block(dim, num_heads, dropout) for i in range(num_layers)})
        self.norm: LayerNorm | None = LayerNorm(dim)
        # as published: the rows that only pad the vocabulary are not counted
        self.num_parameters = sum(p.numel() for p in self.parameters()) - (padded - vocab_size) * dim

    def forward(self, inputs: Tensor, targets: Tensor | None = None) -> Tensor:
        x = inputs
        if self.is_first:
            assert self.embed is not None and self.positions is not None
            position = torch.arange(inputs.shape[1], device=inputs.device)
            # the residual stream is float32 in every precision, too
            x = self.dropout(self.embed(inputs).float() + self.positions(position).float())
        for layer in self.layers.values():
            x = layer(x)
        if not self.is_last:
            return x
        assert self.embed is not None and self.norm is not None
        logits = F.linear(self.norm(x), self.embed.weight)  # tied: no second matrix, and no tie for a wrapper to break
        if targets is None:
            return logits[..., : self.vocab_size]
        return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())

    # ---- the plans -------------------------------------------------------------------------------------------

    def init_weights(self, name: str, weight: Tensor, generator: torch.Generator) -> None:
        """Fill one whole weight. Called per name with its own generator, so order and sharding do not matter."""
        if name.endswith("bias"):
            weight.zero_()
        elif "norm" in name:
            weight.fill_(1.0)
        else:
            into_residual = name.endswith(("proj.weight", "down.weight"))
            std = 0.02 / math.sqrt(2 * self.num_layers) if into_residual else 0.02
            weight.normal_(0.0, std, generator=generator)

    def fsdp_units(self) -> list[nn.Module]:
        """The modules gathered one at a time under fsdp; also the unit of activation checkpointing."""
        return list(self.layers.values())

    def tp_plan(self) -> dict[str, ParallelStyle]:
        """Cut each block's matrices over the tensor-parallel ranks: two all-reduces a block and direction."""
        from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel

        plan: dict[str, ParallelStyle] = {}
        for i in self.layers:
            plan[f"layers.{i}.attention.qkv"] = ColwiseParallel()
            plan[f"layers.{i}.attention.proj"] = RowwiseParallel()
            plan[f"layers.{i}.mlp.up"] = ColwiseParallel()
            plan[f"layers.{i}.mlp.down"] = RowwiseParallel()
        return plan

    def pipeline_split(self, stage: int, num_stages: int) -> GPT2:
        """Keep what this stage owns and drop the rest; names stay. The tied weight is on both ends."""
        low, high = (self.num_layers * s // num_stages for s in (stage, stage + 1))
        for i in list(self.layers):
            if not low <= int(i) < high:
                del self.layers[i]
        self.is_first, self.is_last = stage == 0, stage == num_stages - 1
        if not self.is_first:
            self.positions = None
        if not self.is_last:
            self.norm = None
        if not (self.is_first or self.is_last):
            self.embed = None
        return self

    def flops_per_sample(self) -> float:
        """Forward and backward of one sequence: 6 per parameter and token, and 12·layers·dim·length for attention."""
        return self.seq_len * (6.0 * self.num_parameters + 12.0 * self.num_layers * self.dim * self.seq_len)
