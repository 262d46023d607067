"""1,797 handwritten digits of 8x8 pixels, inside the package: real images without a download.

E. Alpaydin and C. Kaynak, Optical Recognition of Handwritten Digits, UCI Machine Learning Repository, 1998,
https://doi.org/10.24432/C50P49, licence CC BY 4.0 (https://creativecommons.org/licenses/by/4.0/). digits.npz has the
1,797 digits of its test part, by 13 writers, unchanged: `pictures` [1797, 8, 8] from 0 (paper) to 16 (ink), `labels`.
scikit-learn's load_digits returns the same.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

from dtrain.data.small_images import STILL, Moves, PixelDataset, check_shape
from dtrain.data.token_stream import check_split, hash_share

FILE = Path(__file__).with_name("digits.npz")
HELD_OUT = 36  # per class, so 360 in all: a fifth, and divisible by many batch sizes


def check(image_size: int, channels: int = 1, shift: float = 0.0, rotate: float = 0.0) -> dict[str, int]:
    """Refuse settings that cannot work; return the model's required settings."""
    check_shape(image_size, channels)
    Moves(shift, rotate).check()
    return {"num_classes": 10}


class Digits:
    """Resized to the model's image size. The same 360 are always held out, equally many per class."""

    def __init__(self, image_size: int, channels: int = 1, shift: float = 0.0, rotate: float = 0.0) -> None:
        check(image_size, channels, shift, rotate)
        self.shape, self.moves = (image_size, channels), Moves(shift, rotate)

    def dataset(self, split: str) -> PixelDataset:
        """The samples of "train" or "val"."""
        check_split(split)
        with np.load(FILE, allow_pickle=False) as file:
            pictures, labels = file["pictures"], file["labels"]
        chosen = held_out(labels) if split == "val" else ~held_out(labels)
        moves = self.moves if split == "train" else STILL
        mean, std = (0.3053,), (0.3760,)  # of all pixels
        return PixelDataset(pictures[chosen, None], labels[chosen], *self.shape, mean, std, moves, largest=16)


def held_out(labels: np.ndarray) -> np.ndarray:
    """Return for each sample whether it is held out: per class those with the lowest hash of their index."""
    chosen = np.zeros(len(labels), dtype=bool)
    for label in range(10):
        ranked = sorted(np.flatnonzero(labels == label), key=lambda i: hash_share(f"digits/{i}"))
        chosen[ranked[:HELD_OUT]] = True
    return chosen
