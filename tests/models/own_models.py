"""Hugging Face models as a user writes them, for tests: ranks import this file."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset


def gpt2() -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    return GPT2LMHeadModel(GPT2Config(n_layer=2, n_embd=16, n_head=2, vocab_size=31, n_positions=8, **NO_DROPOUT))


NO_DROPOUT = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}


def bert() -> nn.Module:
    from transformers import BertConfig, BertForSequenceClassification

    sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}
    return BertForSequenceClassification(
        BertConfig(vocab_size=31, max_position_embeddings=8, num_labels=3, **sizes)  # with dropout
    )


class Block(nn.Module):
    def __init__(self, mask: torch.Tensor, norm: nn.Module) -> None:
        super().__init__()
        self.mix, self.norm = nn.Linear(8, 8), norm
        self.register_buffer("mask", mask)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.norm(self.mix(x).transpose(1, 2) @ self.mask).transpose(1, 2)


class Shares(nn.Module):
    """Weights, buffers and modules under several names, a buffer that is not saved, two inputs, a tuple as output."""

    def __init__(self) -> None:
        super().__init__()
        mask, norm = torch.ones(8, 8).triu() / 8, nn.BatchNorm1d(8)
        self.embed, self.head = nn.Embedding(31, 8), nn.Linear(8, 31, bias=False)
        self.blocks = nn.ModuleList(Block(mask, norm) for _ in range(2))
        self.head.weight = self.embed.weight
        self.register_buffer("scale", torch.full((1,), 0.5), persistent=False)

    def forward(self, ids: torch.Tensor, keep: torch.Tensor, targets: torch.Tensor | None = None) -> Any:
        x = self.embed(ids) * keep[..., None] * self.scale
        for block in self.blocks:
            x = block(x)
        scores = self.head(x)
        return scores, None if targets is None else nn.functional.cross_entropy(scores.flatten(0, 1), targets.flatten())


def triples() -> list[Any]:
    ids = [torch.arange(n, n + 8) % 31 for n in range(48)]
    return [(row, torch.ones(8), (row + 1) % 31) for row in ids]


class Tokens(Dataset[Any]):
    """Rows of different lengths: the rest of the labels is -100."""

    def __init__(self, num: int = 48) -> None:
        self.num = num

    def __len__(self) -> int:
        return self.num

    def __getitem__(self, index: int) -> Any:
        ids = torch.tensor([(index + 3 * k) % 31 for k in range(8)])
        keep = torch.arange(8) < 4 + index % 5
        return {"input_ids": ids, "attention_mask": keep.long(), "labels": torch.where(keep, ids, -100)}


class Texts(Tokens):
    def __getitem__(self, index: int) -> Any:
        return {**super().__getitem__(index), "labels": index % 3}


class Ends(nn.Module):
    """Each of its forwards ends in another way, for a warning that must not be false."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(4, 3)
        self.squash, self.block = nn.Softmax(-1), nn.Sequential(nn.Linear(4, 3), nn.Softmax(-1))


class Function(Ends):
    def forward(self, x: Tensor) -> Tensor:
        return torch.softmax(self.head(x), -1)


class Method(Ends):
    def forward(self, x: Tensor) -> Tensor:
        x = self.head(x)
        x = x.softmax(-1)
        return x


class Layer(Ends):
    def forward(self, x: Tensor) -> Tensor:
        return self.squash(self.head(x))


class InBlock(Ends):
    def forward(self, x: Tensor) -> Tensor:
        return self.block(x)


class Logarithm(Ends):
    def forward(self, x: Tensor) -> Tensor:
        return torch.log_softmax(self.head(x), -1)


class Attention(Ends):
    def forward(self, x: Tensor) -> Tensor:
        weights = x.softmax(-1)
        return self.head(weights * x)


class Evaluates(Ends):
    def forward(self, x: Tensor) -> Tensor:
        x = self.head(x)
        if not self.training:
            x = x.softmax(-1)
        return x


class Scores(Ends):
    def forward(self, x: Tensor) -> Tensor:
        return self.head(x)


def sum_by_name(outputs: Tensor, targets: Tensor) -> Tensor:
    return nn.functional.cross_entropy(outputs, targets, reduction="sum")


def sum_of_squares(outputs: Tensor, targets: Tensor) -> Tensor:
    errors = (outputs - targets) ** 2
    return errors.sum()


def divided(outputs: Tensor, targets: Tensor) -> Tensor:
    return nn.functional.cross_entropy(outputs, targets, reduction="sum") / len(targets)


def sometimes(outputs: Tensor, targets: Tensor) -> Tensor:
    loss = ((outputs - targets) ** 2).sum()
    if len(targets) > 1:
        loss = loss / len(targets)
    return loss
