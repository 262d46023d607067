"""Llama (Touvron et al., 2023; Grattafiori et al., 2024): RMS norms, rotary positions, a gated MLP, shared key heads.

A plain module, like GPT2. The rotation pairs element i of a head with element i + half, as in Hugging Face's files, so
their weights fit unchanged. Every Llama from 1 to 3.2 is a set of values for this constructor
(conf/model/llama-*.yaml).
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from dtrain.models.layers import Attend, Context, Head, RMSNorm, attend, places, tokens_of, transformer_tp_plan

if TYPE_CHECKING:
    from torch.distributed.tensor.parallel import ParallelStyle


def rotate(x: Tensor, rotary: Tensor) -> Tensor:
    """Rotate each pair of [batch, heads, length, head_dim] by its position's angle, in fp32; keep the input's dtype."""
    cos, sin = rotary
    first, second = x.float().chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1).to(x.dtype)


class Attention(nn.Module):
    def __init__(self, dim: int, num_heads: int, num_kv_heads: int, dropout: float) -> None:
        super().__init__()
        self.head_dim = dim // num_heads
        self.dropout = dropout
        self.q = nn.Linear(dim, dim, bias=False)
        self.k = nn.Linear(dim, num_kv_heads * self.head_dim, bias=False)
        self.v = nn.Linear(dim, num_kv_heads * self.head_dim, bias=False)
        self.proj = nn.Linear(dim, dim, bias=False)

    def forward(self, x: Tensor, rotary: Tensor, mask: Tensor | None = None, cached: Attend | None = None) -> Tensor:
        q, k, v = (m(x).unflatten(-1, (-1, self.head_dim)).transpose(1, 2) for m in (self.q, self.k, self.v))
        q, k = rotate(q, rotary), rotate(k, rotary)
        if cached is not None:
            heads = cached(q, k, v, mask)
        else:
            heads = attend(q, k, v, mask, self.dropout if self.training else 0.0)
        out: Tensor = self.proj(heads)
        return out


class MLP(nn.Module):
    def __init__(self, dim: int, hidden_dim: int) -> None:
        super().__init__()
        self.gate = nn.Linear(dim, hidden_dim, bias=False)
        self.up = nn.Linear(dim, hidden_dim, bias=False)
        self.down = nn.Linear(hidden_dim, dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down(F.silu(self.gate(x)) * self.up(x))
        return out


class Block(nn.Module):
    def __init__(
        self, dim: int, num_heads: int, num_kv_heads: int, hidden_dim: int, norm_eps: float, dropout: float
    ) -> None:
        super().__init__()
        self.norm1 = RMSNorm(dim, norm_eps)
        self.attention = Attention(dim, num_heads, num_kv_heads, dropout)
        self.norm2 = RMSNorm(dim, norm_eps)
        self.mlp = MLP(dim, hidden_dim)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor, rotary: Tensor, mask: Tensor | None = None, cached: Attend | None = None) -> Tensor:
        x = x + self.dropout(self.attention(self.norm1(x), rotary=rotary, mask=mask, cached=cached))
        return x + self.dropout(self.mlp(self.norm2(x)))


class Llama(nn.Module):
    perplexity = True  # exp(loss) is meaningful
    stream = torch.float32  # dtype of the residual stream between blocks (precision.stream)

    def __init__(
        self,
        num_layers: int,
        dim: int,
        num_heads: int,
        num_kv_heads: int,
        hidden_dim: int,
        vocab_size: int,
        seq_len: int,
        vocab_multiple: int = 128,
        dropout: float = 0.0,
        rope_theta: float = 10000.0,
        rope_factor: float = 1.0,
        rope_low_freq_factor: float = 1.0,
        rope_high_freq_factor: float = 4.0,
        rope_original_len: int = 8192,
        norm_eps: float = 1e-5,
        tied: bool = False,
    ) -> None:
        super().__init__()
        self.num_layers, self.dim, self.seq_len, self.vocab_size = num_layers, dim, seq_len, vocab_size
        self.head_dim = dim // num_heads
        self.rope_theta, self.rope_factor, self.rope_original_len = rope_theta, rope_factor, rope_original_len
        self.rope_low_freq_factor, self.rope_high_freq_factor = rope_low_freq_factor, rope_high_freq_factor
        padded = math.ceil(vocab_size / vocab_multiple) * vocab_multiple
        self.is_first = self.is_last = True  # of the pipeline; an unsplit model is both
        self.tied = tied
        self.embed: nn.Embedding | None = nn.Embedding(padded, dim)
        self.dropout = nn.Dropout(dropout)
        self.layers = nn.ModuleDict(
            {
                str(i): Block(dim, num_heads, num_kv_heads, hidden_dim, norm_eps, dropout)
                for i in range(num_layers)
            }
        )  # fmt: skip
        self.norm: RMSNorm | None = RMSNorm(dim, norm_eps)
        # tied: no second matrix, and no tie for a wrapper to break
        self.output: nn.Linear | None = None if tied else nn.Linear(dim, padded, bias=False)
        self.head = Head()
        # as published: vocabulary padding is not counted
        padding = (padded - vocab_size) * dim * (1 if tied else 2)
        self.num_parameters = sum(p.numel() for p in self.parameters()) - padding

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
        rotary = self.rotary(positions)
        x = inputs
        if self.is_first:
            x = self.embedded(tokens_of(inputs, cache))
        for name, layer in self.layers.items():
            x = layer(x, rotary=rotary, mask=mask, cached=cache.of(name) if cache else None)
        if cache:
            cache.advance(inputs.shape[1])
        if not self.is_last:
            return x
        weights = self.embed if self.tied else self.output
        assert weights is not None and self.norm is not None
        out: Tensor = self.head(self.norm(x), weights.weight, targets)
        return out if targets is not None else out[..., : self.vocab_size]

    def embedded(self, tokens: Tensor) -> Tensor:
        assert self.embed is not None
        x: Tensor = self.dropout(self.embed(tokens).float())
        return x.to(self.stream)

    def rotary(self, positions: Tensor) -> Tensor:
        """Return cosines and sines [2, (batch, 1,) length, head_dim / 2] of each pair's angle, in fp32.

        They are recomputed in every pass, which is cheap compared with a layer, so no checkpoint holds them as a
        buffer. Llama 3.1 stretches a model of `rope_original_len` tokens: pairs that turn fewer than
        `rope_low_freq_factor` times within it turn `rope_factor` times slower, those that turn more than
        `rope_high_freq_factor` times are unchanged, and those between are interpolated.
        """
        halves = torch.arange(0, self.head_dim, 2, device=positions.device).float()
        frequency = 1.0 / self.rope_theta ** (halves / self.head_dim)
        if self.rope_factor != 1.0:
            turns = self.rope_original_len * frequency / (2 * math.pi)
            low, high = self.rope_low_freq_factor, self.rope_high_freq_factor
            stays = ((turns - low) / (high - low)).clamp(0.0, 1.0)
            frequency = frequency * (stays + (1.0 - stays) / self.rope_factor)
        # an elementwise product: a matmul would run in 16 bits under autocast
        angle = positions[..., None].float() * frequency
        if positions.ndim == 2:
            angle = angle[:, None]  # one table for all heads
        return torch.stack([angle.cos(), angle.sin()])

    # ---- the plans -------------------------------------------------------------------------------------------

    def init_weights(self, name: str, weight: Tensor, generator: torch.Generator) -> None:
        """Fill one full weight. Called per name with its own generator, so order and sharding do not matter."""
        if "norm" in name:
            weight.fill_(1.0)
        else:
            into_residual = name.endswith(("proj.weight", "down.weight"))
            std = 0.02 / math.sqrt(2 * self.num_layers) if into_residual else 0.02
            weight.normal_(0.0, std, generator=generator)

    def fsdp_units(self) -> list[nn.Module]:
        """Return the modules gathered one at a time under fsdp; also the units of activation checkpointing."""
        return list(self.layers.values())

    def tp_plan(self, sequence_parallel: bool = False, loss_parallel: bool = False) -> dict[str, ParallelStyle]:
        """Return the tensor-parallel plan: heads (of keys, too) and the MLP's width are sharded."""
        return transformer_tp_plan(
            self,
            columns=("attention.q", "attention.k", "attention.v", "mlp.gate", "mlp.up"),
            rows=("attention.proj", "mlp.down"),
            vocabulary=("embed", "output"),
            sequence_parallel=sequence_parallel,
            loss_parallel=loss_parallel,
        )

    def pipeline_split(self, low: int, high: int) -> Llama:
        """Keep the layers from `low` to before `high`, with the ends that belong to them, and drop the rest.

        Names stay. A tied weight is on both ends; a stage that is not the last ignores the targets.
        """
        for i in list(self.layers):
            if not low <= int(i) < high:
                del self.layers[i]
        self.is_first, self.is_last = low == 0, high == self.num_layers
        if not self.is_last:
            self.norm = self.output = None
        if not (self.is_first or (self.is_last and self.tied)):
            self.embed = None
        return self

    def flops_per_sample(self) -> float:
        """FLOPs (forward, backward) of one sequence: 6 per GEMM weight and token, 12·layers·dim·length for attention.

        A lookup-only embedding is not a GEMM. Attention counts in full, without the half that causality saves, as for
        GPT-2.
        """
        multiplied = self.num_parameters - (0 if self.tied else self.vocab_size * self.dim)
        return self.seq_len * (6.0 * multiplied + 12.0 * self.num_layers * self.dim * self.seq_len)
