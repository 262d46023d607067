"""Samples as consecutive windows of a token stream, regardless of document boundaries."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from torch import Tensor

IGNORED = -100  # dtrain.models.layers.IGNORED; importing that would import torch


def fingerprint(tokens: np.ndarray) -> str:
    """Identify the text: a hash of 256 places in it, fast even for a file of a terabyte."""
    places = np.linspace(0, max(0, len(tokens) - 64), 256).astype(np.int64)
    windows = tokens[places[:, None] + np.arange(min(64, len(tokens)))]
    return hashlib.sha256(np.ascontiguousarray(windows).astype("<u4").tobytes()).hexdigest()[:16]


class TokenDataset:
    """Consecutive windows of one token array; targets are the inputs shifted by one."""

    def __init__(self, tokens: np.ndarray, seq_len: int, name: str = "data") -> None:
        if seq_len < 1:
            raise ValueError(f"model.seq_len={seq_len} must be at least 1")
        self.tokens = tokens
        self.seq_len = seq_len
        self.num_samples = (len(tokens) - 1) // seq_len
        if self.num_samples < 1:
            fix = "raise data.val_fraction" if name == "val" else "add text"
            raise ValueError(
                f"model.seq_len={seq_len} needs at least {seq_len + 1} tokens for one sample, but the {name} "
                f"split has {len(tokens)}\n  fix: {fix} or set model.seq_len to at most {max(1, len(tokens) - 1)}"
            )

    @property
    def fingerprint(self) -> str:
        return fingerprint(self.tokens)

    def __len__(self) -> int:
        return self.num_samples

    def batch(self, indices: np.ndarray) -> tuple[Tensor, Tensor]:
        import torch

        # One gather for the batch; only these windows become int64, so a memmap stays on disk.
        where = np.asarray(indices)[:, None] * self.seq_len + np.arange(self.seq_len + 1)
        windows = torch.from_numpy(np.asarray(self.tokens[where]).astype(np.int64))
        return windows[:, :-1].contiguous(), windows[:, 1:].contiguous()
