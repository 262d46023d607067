"""Packed documents to train on: rows of short documents, each counting in threes from somewhere."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from dtrain.models.layers import IGNORED


class PackedDataset:
    """Sample i is a row of documents; nothing follows a document's last token, so it has no target."""

    masked = True

    def __init__(self, seq_len: int, vocab_size: int, num_samples: int, seed: int, first: int) -> None:
        self.seq_len, self.vocab_size, self.num_samples = seq_len, vocab_size, num_samples
        self.seed, self.first = seed, first

    def __len__(self) -> int:
        return self.num_samples

    def row(self, index: int) -> tuple[list[int], list[int], list[int]]:
        draw = np.random.default_rng([self.seed, self.first + index])
        tokens: list[int] = []
        positions: list[int] = []
        targets: list[int] = []
        # the first has two tokens at least: every sample has a target that counts
        while (left := self.seq_len - len(tokens)) > 0:
            length = min(left, int(draw.integers(1 if tokens else 2, self.seq_len // 2 + 1)))
            start = int(draw.integers(self.vocab_size))
            document = [(start + 3 * k) % self.vocab_size for k in range(length)]
            tokens += document
            positions += range(length)
            targets += [*document[1:], IGNORED]
        return tokens, positions, targets

    def batch(self, indices: np.ndarray) -> tuple[Tensor, Tensor]:
        rows = torch.tensor([self.row(int(i)) for i in indices])
        return torch.stack([rows[:, 0], rows[:, 1]], dim=-1), rows[:, 2].contiguous()


class Packed:
    def __init__(
        self, seq_len: int, vocab_size: int, num_samples: int = 1000, seed: int = 0, uneven: bool = False
    ) -> None:
        self.settings = (seq_len, vocab_size, num_samples, seed)

    def dataset(self, split: str) -> PackedDataset:
        return PackedDataset(*self.settings, first=0 if split == "train" else self.settings[2])
