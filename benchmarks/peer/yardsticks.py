"""The models that the peers train: good plain ones with dtrain's sizes; `model(inputs, targets)` is the loss.

Language models are written here, once, for every tool that brings none of its own: matrices as large as they can be
(queries, keys and values in one), scaled_dot_product_attention, a tied head, the loss on float32 logits. Vision models
are timm's and torchvision's. The sizes are those of a composed `model` section.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

IGNORED = -100


class Attention(nn.Module):
    """All heads at once; fewer heads of keys and values than of queries are shared by neighbours."""

    def __init__(self, dim: int, heads: int, kv_heads: int, bias: bool, causal: bool, dropout: float) -> None:
        super().__init__()
        self.head_dim, self.causal, self.dropout = dim // heads, causal, dropout
        self.widths = [dim, kv_heads * self.head_dim, kv_heads * self.head_dim]
        self.qkv = nn.Linear(dim, sum(self.widths), bias=bias)
        self.out = nn.Linear(dim, dim, bias=bias)

    def forward(self, x: Tensor, turn: Tensor | None) -> Tensor:
        q, k, v = (
            part.unflatten(-1, (-1, self.head_dim)).transpose(1, 2) for part in self.qkv(x).split(self.widths, -1)
        )
        if turn is not None:
            q, k = rotate(q, turn).to(v.dtype), rotate(k, turn).to(v.dtype)
        y = F.scaled_dot_product_attention(
            q, k, v, is_causal=self.causal, dropout_p=self.dropout if self.training else 0.0,
            enable_gqa=q.shape[1] != k.shape[1],
        )  # fmt: skip
        return self.out(y.transpose(1, 2).flatten(2))


def rotate(x: Tensor, turn: Tensor) -> Tensor:
    """Rotary positions: the first half of a head is turned against the second."""
    a, b = x.chunk(2, -1)
    cos, sin = turn
    return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)


class Block(nn.Module):
    """Pre-norm (GPT-2, Llama) or post-norm (BERT); a plain MLP with GELU, or a gated one with SiLU."""

    def __init__(self, kind: str, sizes: Any) -> None:
        super().__init__()
        llama, dim, dropout = kind == "llama", sizes.dim, sizes.dropout
        self.kind, hidden = kind, sizes.hidden_dim if llama else 4 * dim
        kv_heads = sizes.num_kv_heads if llama else sizes.num_heads
        self.attention = Attention(dim, sizes.num_heads, kv_heads, not llama, kind != "bert", dropout)
        self.norm1, self.norm2 = norm(kind, dim), norm(kind, dim)
        self.up = nn.Linear(dim, 2 * hidden if llama else hidden, bias=not llama)
        self.down = nn.Linear(hidden, dim, bias=not llama)
        self.dropout = nn.Dropout(dropout)

    def mlp(self, x: Tensor) -> Tensor:
        x = self.up(x)
        if self.kind == "llama":
            gate, value = x.chunk(2, -1)
            return self.down(F.silu(gate) * value)
        return self.down(F.gelu(x, approximate="tanh" if self.kind == "gpt2" else "none"))

    def forward(self, x: Tensor, turn: Tensor | None) -> Tensor:
        if self.kind == "bert":
            x = self.norm1(x + self.dropout(self.attention(x, turn)))
            return self.norm2(x + self.dropout(self.mlp(x)))
        x = x + self.dropout(self.attention(self.norm1(x), turn))
        return x + self.dropout(self.mlp(self.norm2(x)))


def norm(kind: str, dim: int) -> nn.Module:
    return nn.RMSNorm(dim, eps=1e-5) if kind == "llama" else nn.LayerNorm(dim, eps=1e-12 if kind == "bert" else 1e-5)


class Language(nn.Module):
    """GPT-2, Llama or BERT (masked tokens). Its vocabulary is padded to a multiple of 128, as GPT-2's to 50,304."""

    def __init__(self, kind: str, sizes: Any) -> None:
        super().__init__()
        self.kind, vocabulary = kind, -(-sizes.vocab_size // 128) * 128
        self.embed = nn.Embedding(vocabulary, sizes.dim)
        if kind == "llama":
            self.theta, self.head_dim = sizes.rope_theta, sizes.dim // sizes.num_heads
        else:
            self.positions = nn.Embedding(sizes.seq_len, sizes.dim)
        if kind == "bert":
            self.embed_norm, self.transform = norm(kind, sizes.dim), nn.Linear(sizes.dim, sizes.dim)
        self.dropout = nn.Dropout(sizes.dropout)
        self.blocks = nn.ModuleList(Block(kind, sizes) for _ in range(sizes.num_layers))
        self.norm = norm(kind, sizes.dim)
        self.head = nn.Linear(sizes.dim, vocabulary, bias=kind == "bert")
        if kind != "llama" or sizes.tied:
            self.head.weight = self.embed.weight
        self.apply(first_values)
        self.asked = round(0.15 * sizes.seq_len)  # of a BERT sample; so many of each one have a target

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        x, turn = self.embed(tokens), None
        place = torch.arange(tokens.shape[1], device=tokens.device)
        if self.kind == "llama":
            halves = torch.arange(0, self.head_dim, 2, device=tokens.device).float() / self.head_dim
            angle = place[:, None].float() * self.theta**-halves
            turn = torch.stack([angle.cos(), angle.sin()])
        else:
            x = x + self.positions(place)
        x = self.dropout(self.embed_norm(x) if self.kind == "bert" else x)
        for block in self.blocks:
            x = block(x, turn)
        if self.kind == "bert":  # the head of those tokens alone that are asked for: a seventh, and no host sync
            chosen = (targets == IGNORED).int().argsort(dim=1, stable=True)[:, : self.asked]
            x, targets = x.gather(1, chosen[..., None].expand(-1, -1, x.shape[-1])), targets.gather(1, chosen)
            x = F.gelu(self.transform(x))
        logits = self.head(self.norm(x))
        return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten(), ignore_index=IGNORED)


def first_values(module: nn.Module) -> None:
    if isinstance(module, (nn.Linear, nn.Embedding)):
        nn.init.normal_(module.weight, std=0.02)
        if getattr(module, "bias", None) is not None:
            nn.init.zeros_(module.bias)


class Pictures(nn.Module):
    """A vision model of timm or torchvision with its loss; convolutions with their channels last in memory."""

    def __init__(self, kind: str, sizes: Any, source: str) -> None:
        super().__init__()
        self.net = vision(kind, sizes, source)
        self.channels_last = kind == "resnet"
        if self.channels_last:
            self.to(memory_format=torch.channels_last)

    def forward(self, images: Tensor, targets: Tensor) -> Tensor:
        if self.channels_last:
            images = images.to(memory_format=torch.channels_last)
        return F.cross_entropy(self.net(images).float(), targets)


def vision(kind: str, sizes: Any, source: str) -> nn.Module:
    """A bare vision model with our sizes, from the package `source`."""
    classes = sizes.num_classes
    if kind == "resnet":
        name = f"resnet{'50' if sizes.bottleneck else '18'}"
        if source == "timm":
            import timm

            return timm.create_model(name, num_classes=classes)
        import torchvision

        return getattr(torchvision.models, name)(num_classes=classes)
    if source == "timm":
        from timm.models import VisionTransformer

        return VisionTransformer(
            img_size=sizes.image_size, patch_size=sizes.patch_size, in_chans=sizes.channels, num_classes=classes,
            embed_dim=sizes.dim, depth=sizes.num_layers, num_heads=sizes.num_heads,
        )  # fmt: skip
    from torchvision.models import VisionTransformer as Other

    return Other(
        image_size=sizes.image_size, patch_size=sizes.patch_size, num_layers=sizes.num_layers, hidden_dim=sizes.dim,
        num_heads=sizes.num_heads, mlp_dim=4 * sizes.dim, num_classes=classes,
    )  # fmt: skip


def kind_of(sizes: Any) -> str:
    """gpt2, llama, bert, vit or resnet: the module of dtrain's class."""
    return str(sizes["_target_"]).split(".")[2]


def yardstick(sizes: Any, source: str = "timm") -> nn.Module:
    """The model that a tool without one of its own trains."""
    kind = kind_of(sizes)
    return Pictures(kind, sizes, source) if kind in ("vit", "resnet") else Language(kind, sizes)
