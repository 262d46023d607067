"""What all scripts of this folder train: a small language model, on samples of one length or of many."""

from __future__ import annotations

import argparse

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import Dataset

VOCABULARY, LENGTH, SAMPLES = 61, 16, 64


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--batch", type=int, required=True, help="samples of a process in each step")
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--uneven", action="store_true", help="samples of different lengths, padded with -100")
    parser.add_argument("--shuffle", action="store_true", help="let the tool shuffle the samples")
    parser.add_argument("--accumulate", type=int, default=1, help="micro-batches of a step")
    options = parser.parse_args()
    torch.manual_seed(0)
    return options


class Tokens(Dataset[dict[str, Tensor]]):
    def __init__(self, uneven: bool) -> None:
        draw = torch.Generator().manual_seed(1)
        self.tokens = torch.randint(0, VOCABULARY, (SAMPLES, LENGTH), generator=draw)
        self.labels = self.tokens.clone()
        if uneven:
            lengths = 2 + (torch.rand(SAMPLES, generator=draw) ** 2 * (LENGTH - 2)).long()
            self.labels[torch.arange(LENGTH) >= lengths[:, None]] = -100

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, i: int) -> dict[str, Tensor]:
        return {"input_ids": self.tokens[i], "labels": self.labels[i]}


class Model(nn.Module):
    """Returns the mean loss over the targets that count, as models of transformers do."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, 32)
        self.inner = nn.Linear(64, 64)
        self.head = nn.Linear(64, VOCABULARY)

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        x = self.embed(input_ids)
        mean = x.cumsum(1) / torch.arange(1, LENGTH + 1)[:, None]
        logits = self.head(self.inner(torch.cat([x, mean], dim=-1)).tanh())
        return F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
