"""A user's own data set, for tests: synthetic samples, and a file per rank that says which ones were asked for."""

from __future__ import annotations

import json
import os

import numpy as np
from torch import Tensor

from dtrain.data.synthetic import Synthetic


class Recorded:
    def __init__(self, dataset: object, path: str) -> None:
        self.dataset, self.path = dataset, path

    def __len__(self) -> int:
        return len(self.dataset)  # type: ignore[arg-type]

    def batch(self, indices: np.ndarray) -> tuple[Tensor, Tensor]:
        if indices.tolist() != [0]:  # what a run reads before its first step, to check a sample
            with open(f"{self.path}-{os.environ['RANK']}", "a") as file:
                file.write(json.dumps(indices.tolist()) + "\n")
        return self.dataset.batch(indices)  # type: ignore[attr-defined, no-any-return]


class Recorder(Synthetic):
    def __init__(
        self, seq_len: int, vocab_size: int, path: str, num_samples: int = 300, seed: int = 0, uneven: bool = False
    ) -> None:
        super().__init__(seq_len, vocab_size, num_samples, seed)
        self.path = path

    def dataset(self, split: str) -> Recorded:  # type: ignore[override]
        return Recorded(super().dataset(split), self.path)
