"""Models and data as people have them, for tests/data/test_adapt.py: ranks import this file."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset, WeightedRandomSampler


class Net(nn.Module):
    def __init__(self, inputs: int = 8) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(inputs, 16), nn.Linear(16, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.first(x).tanh())


class Named(Net):
    """Called as model(**batch); returns a dict with its loss."""

    def forward(self, x: Tensor, scale: Tensor | None = None, labels: Tensor | None = None) -> Any:  # type: ignore[override]
        logits = super().forward(x if scale is None else x * scale[:, None])
        return {"logits": logits} if labels is None else {"loss": F.cross_entropy(logits, labels), "logits": logits}


class Whole(Net):
    """Called as model(batch); returns several losses."""

    def forward(self, batch: dict[str, Tensor]) -> dict[str, Tensor]:  # type: ignore[override]
        logits = super().forward(batch["x"])
        return {"entropy": F.cross_entropy(logits, batch["labels"]), "size": 0.01 * logits.square().mean()}


class Drawing(Dataset[Any]):
    """Each sample also depends on random draws, from all three generators."""

    def __init__(self, num: int = 48) -> None:
        self.num = num

    def __len__(self) -> int:
        return self.num

    def __getitem__(self, index: int) -> Any:
        x = torch.arange(8) * 0.1 + index / self.num
        return x + random.random() + np.random.rand() + torch.rand(8), index % 3


class Dicts(Drawing):
    def __getitem__(self, index: int) -> Any:
        x, y = super().__getitem__(index)
        return {"x": x, "scale": 1.0 + index / 100, "labels": y, "text": "not a number"}


class Pictures(Dataset[Any]):
    """The interface of torchvision's data sets: `train`, `transform`, (PIL image, class)."""

    def __init__(self, train: bool = True, transform: Any = None) -> None:
        self.size, self.transform = (32 if train else 16), transform

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> Any:
        image = Image.fromarray(np.full((4, 4, 3), index * 7 % 255, np.uint8))
        return (self.transform(image) if self.transform else image), index % 3


class Flat(Net):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.flatten(1))


def by_name(samples: list[Any]) -> dict[str, Tensor]:
    return {"x": torch.stack([x for x, _ in samples]), "labels": torch.tensor([y for _, y in samples])}


def loader() -> Any:
    return DataLoader(Drawing(), batch_size=4, shuffle=True, collate_fn=by_name), DataLoader(
        Drawing(16), collate_fn=by_name
    )


def in_order() -> Any:
    return DataLoader(Drawing(), batch_size=4)


def weighted() -> Any:
    return DataLoader(Drawing(), sampler=WeightedRandomSampler([1.0] * 24 + [0.0] * 24, 40))


def digits() -> Any:
    from sklearn.datasets import load_digits
    from sklearn.model_selection import train_test_split

    return train_test_split(*load_digits(return_X_y=True), test_size=0.25, random_state=0)


def nothing() -> None:
    Drawing()


class NoLength(Dataset[Any]):
    def __getitem__(self, index: int) -> Any:
        return torch.ones(8), 0


class OnlyIterates(Dataset[Any]):
    def __iter__(self) -> Any:
        yield torch.ones(8), 0


def no_length() -> Any:
    return NoLength()


def only_iterates() -> Any:
    return OnlyIterates()


class Useless:
    def read(self) -> None: ...


def only_train(split: str) -> Any:
    return (np.ones((8, 3), np.float32), np.zeros(8, np.int64)) if split == "train" else None
