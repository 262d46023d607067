"""MNIST, and datasets in its format (Fashion-MNIST, KMNIST), from its four files. Nothing is downloaded."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np

from dtrain.data.files import UNREADABLE, open_file
from dtrain.data.small_images import STILL, Moves, PixelDataset, check_shape, folder_of
from dtrain.data.token_stream import check_split
from dtrain.errors import bad

CUT_OFF = "is shorter or longer than its header says: it is truncated or damaged"
LARGEST = 2**32  # bytes; the largest dataset in this format has 2**30
LARGEST_RATIO = 1100  # gzip compresses to 1/1032 at best: a header that implies more is damaged
PARTS = {"train": "train", "val": "t10k"}


def find_idx(folder: Path, name: str) -> Path:
    """Find `train-images-idx3-ubyte`, also with a dot for the last dash as in some archives, or with .gz."""
    left, _, right = name.partition("-idx")
    names = [f"{base}{end}" for base in (name, f"{left}.idx{right}") for end in ("", ".gz")]
    for found in (folder / n for n in names):
        if found.is_file():
            return found
    raise bad("data.path", folder, f"has no {name} or {name}.gz", "put the four files of MNIST there")


def read_idx(path: Path, num_dims: int, header_only: bool = False) -> np.ndarray:
    """Read the array in an idx file: two zeros, 8 for bytes, the number of dimensions, their sizes, then all values."""
    try:
        with open_file(path) as file:
            start = file.read(4 + 4 * num_dims)
            if start[:4] != bytes([0, 0, 8, num_dims]) or len(start) < 4 + 4 * num_dims:
                raise bad(
                    "data.path", path, f"is not an idx file of bytes in {num_dims} dimensions", "download it again"
                )
            shape = tuple(int.from_bytes(start[4 + 4 * i : 8 + 4 * i], "big") for i in range(num_dims))
            size = math.prod(shape)
            if size > min(LARGEST_RATIO * path.stat().st_size, LARGEST):
                raise bad("data.path", path, CUT_OFF, "download it again")
            if 0 in shape[1:]:
                raise bad("data.path", path, f"has values in {' x '.join(map(str, shape))}", "download it again")
            if header_only:
                if path.suffix != ".gz" and path.stat().st_size != len(start) + size:
                    raise bad("data.path", path, CUT_OFF, "download it again")
                return np.empty((0,) * num_dims, dtype=np.uint8)
            values = file.read(size + 1)
    except UNREADABLE as error:  # gzip raises an OSError for a bad file
        reason = getattr(error, "strerror", None) or error
        raise bad("data.path", path, f"cannot be read ({reason})", "download it again") from error
    if len(values) != size:
        raise bad("data.path", path, CUT_OFF, "download it again")
    return np.frombuffer(values, dtype=np.uint8).reshape(shape)


def check(path: str, image_size: int, channels: int = 1, shift: float = 0.0, rotate: float = 0.0) -> dict[str, int]:
    """Refuse settings and files that cannot work, without reading an image; return the model's required settings."""
    check_shape(image_size, channels)
    Moves(shift, rotate).check()
    folder, most = folder_of(path, "MNIST/raw"), 0
    for part in PARTS.values():
        read_idx(find_idx(folder, f"{part}-images-idx3-ubyte"), 3, header_only=True)
        labels = read_idx(find_idx(folder, f"{part}-labels-idx1-ubyte"), 1)
        most = max(most, int(labels.max(initial=0)))
    return {"num_classes": most + 1}


class Mnist:
    """60,000 and 10,000 grayscale digits of 28x28 pixels; the test part is held out."""

    def __init__(self, path: str, image_size: int, channels: int = 1, shift: float = 0.0, rotate: float = 0.0) -> None:
        check(path, image_size, channels, shift, rotate)
        self.folder = folder_of(path, "MNIST/raw")
        self.shape, self.moves = (image_size, channels), Moves(shift, rotate)

    def dataset(self, split: str) -> PixelDataset:
        """The samples of "train" or "val"."""
        check_split(split)
        pictures = read_idx(find_idx(self.folder, f"{PARTS[split]}-images-idx3-ubyte"), 3)
        labels = read_idx(find_idx(self.folder, f"{PARTS[split]}-labels-idx1-ubyte"), 1)
        if len(pictures) != len(labels) or not len(labels):
            rule = f"{len(pictures)} images and {len(labels)} labels of {PARTS[split]}"
            raise bad("data.path", self.folder, rule, "download them again")
        moves = self.moves if split == "train" else STILL
        return PixelDataset(pictures[:, None], labels, *self.shape, (0.1307,), (0.3081,), moves)
