"""CIFAR-10 from the files of its binary version. Nothing is downloaded or unpickled."""

from __future__ import annotations

import os

import numpy as np

from dtrain.data.small_images import STILL, Moves, PixelDataset, check_shape, folder_of
from dtrain.data.token_stream import check_split
from dtrain.errors import bad

INSIDE = "cifar-10-batches-bin"  # the folder in the archive
FILES = {"train": [f"data_batch_{i}.bin" for i in range(1, 6)], "val": ["test_batch.bin"]}
LARGEST = 2**30  # bytes per file; a real one has 2**25
RECORD = 1 + 3 * 32 * 32  # a class and its image, channel by channel


def check(
    path: str, image_size: int, channels: int = 3, shift: float = 0.0, rotate: float = 0.0, flip: bool = True
) -> dict[str, int]:
    """Refuse settings and files that cannot work, without reading an image; return the model's required settings."""
    check_shape(image_size, channels)
    Moves(shift, rotate, flip).check()
    folder = folder_of(path, INSIDE)
    for name in (name for names in FILES.values() for name in names):
        if not (folder / name).is_file():
            if any((folder / n).exists() for n in ("data_batch_1", "cifar-10-batches-py")):
                rule = "has the version for Python, which is pickled, and unpickling a file can run code"
                raise bad(
                    "data.path", folder, rule, "use the binary version, cifar-10-binary.tar.gz from the same page"
                )
            raise bad("data.path", folder, f"has no {name}", "unpack cifar-10-binary.tar.gz there")
        size = os.path.getsize(folder / name)
        if not size or size % RECORD or size > LARGEST:
            rule = f"{name} has {size} bytes, and an image {RECORD}: the file is truncated or damaged"
            raise bad("data.path", folder, rule, "unpack cifar-10-binary.tar.gz again")
    return {"num_classes": 10}


class Cifar10:
    """50,000 and 10,000 colour images of 32x32 pixels; the test part is held out."""

    def __init__(
        self, path: str, image_size: int, channels: int = 3, shift: float = 0.0, rotate: float = 0.0, flip: bool = True
    ) -> None:
        check(path, image_size, channels, shift, rotate, flip)
        self.folder = folder_of(path, INSIDE)
        self.shape, self.moves = (image_size, channels), Moves(shift, rotate, flip)

    def dataset(self, split: str) -> PixelDataset:
        """The samples of "train" or "val"."""
        check_split(split)
        records = [np.fromfile(self.folder / name, dtype=np.uint8).reshape(-1, RECORD) for name in FILES[split]]
        whole = np.concatenate(records)
        if whole[:, 0].max() > 9:
            raise bad(
                "data.path", self.folder, f"has a class {whole[:, 0].max()}, but there are only 10", "unpack it again"
            )
        moves = self.moves if split == "train" else STILL
        mean, std = (0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)
        return PixelDataset(whole[:, 1:].reshape(-1, 3, 32, 32), whole[:, 0], *self.shape, mean, std, moves)
