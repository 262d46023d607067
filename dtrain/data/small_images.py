"""Small images held in memory: resized, shifted and rotated a little, normalized. For digits, mnist and cifar.

Also what all image data needs: random numbers from a sample's key, and checks of settings.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from dtrain.data.counter_rng import bits
from dtrain.errors import bad

if TYPE_CHECKING:
    from torch import Tensor


def uniform(keys: np.ndarray, count: int) -> np.ndarray:
    """Return `count` numbers in [0, 1) per key: they depend only on the key, so a resume draws the same."""
    return (bits(keys, count) >> np.uint64(11)) * 2.0**-53


def check_shape(image_size: int, channels: int) -> None:
    """Refuse sizes that no image can have."""
    if image_size < 1:
        raise ValueError(f"model.image_size={image_size}: must be at least 1 pixel\n  fix: model.image_size=28")
    if channels not in (1, 3):
        raise ValueError(f"model.channels={channels}: images are gray (1) or have colours (3)\n  fix: model.channels=3")


class Moves(NamedTuple):
    """How far a training image is shifted (share of its size) and rotated (degrees), and whether it is mirrored."""

    shift: float = 0.0
    rotate: float = 0.0
    flip: bool = False

    def check(self) -> None:
        for name, value, most in (("shift", self.shift, 1.0), ("rotate", self.rotate, 180.0)):
            if not 0 <= value <= most:
                raise ValueError(f"data.{name}={value}: must be from 0 (not at all) to {most:g}\n  fix: data.{name}=0")


STILL = Moves()


def folder_of(path: str, inside: str) -> Path:
    """Return the folder itself, or the one that its archive creates in it."""
    folder = Path(path).expanduser()
    if not folder.is_dir():
        raise bad("data.path", path, "is not a folder", "give the folder with the files")
    return folder / inside if (folder / inside).is_dir() else folder


class PixelDataset:
    """Images [n, channels, height, width] in 8 bits, and their classes.

    For training each is shifted and rotated by up to what `moves` says, and mirrored half of the time; for validation
    nothing is drawn.
    """

    def __init__(
        self,
        pictures: np.ndarray,
        labels: np.ndarray,
        image_size: int,
        channels: int,
        mean: Sequence[float],
        std: Sequence[float],
        moves: Moves = STILL,
        largest: int = 255,
    ) -> None:
        assert len(pictures) == len(labels) and pictures.dtype == np.uint8
        self.pictures, self.labels, self.image_size, self.channels = pictures, labels, image_size, channels
        self.mean, self.std = (np.array(v, dtype=np.float32)[:, None, None] for v in (mean, std))
        self.moves, self.largest = moves, largest
        self.draws = moves != STILL

    def __len__(self) -> int:
        return len(self.labels)

    @property
    def fingerprint(self) -> str:
        """Identifies the images: a hash of all labels, and of up to 256 images."""
        digest = hashlib.sha256(self.labels.astype("<i8").tobytes())
        digest.update(self.pictures[np.linspace(0, len(self) - 1, min(len(self), 256)).astype(np.int64)].tobytes())
        return digest.hexdigest()[:16]

    def batch(self, indices: np.ndarray, keys: np.ndarray | None = None) -> tuple[Tensor, Tensor]:
        import torch
        from torch.nn import functional as F

        indices = np.asarray(indices)
        images = torch.from_numpy(self.pictures[indices].astype(np.float32) / np.float32(self.largest))
        size = (self.image_size, self.image_size)
        if images.shape[2:] != size:
            images = F.interpolate(images, size, mode="bilinear", antialias=True)
        if keys is not None and self.draws:
            images = F.grid_sample(images, torch.from_numpy(self.places(keys)), align_corners=False)
        images = (images - torch.from_numpy(self.mean)) / torch.from_numpy(self.std)
        if images.shape[1] != self.channels:  # grayscale to RGB, or RGB to grayscale
            images = images.expand(-1, 3, -1, -1) if self.channels == 3 else images.mean(dim=1, keepdim=True)
        return images.contiguous(), torch.from_numpy(self.labels[indices].astype(np.int64))

    def places(self, keys: np.ndarray) -> np.ndarray:
        """Return where each output pixel is read in its image, in [-1, 1] from edge to edge; outside is black.

        It is computed per image, so that an image is the same in every batch, to the last bit.
        """
        centres = (np.arange(self.image_size) * 2.0 + 1.0) / self.image_size - 1.0
        y, x = np.meshgrid(centres, centres, indexing="ij")
        places = np.empty((len(keys), self.image_size, self.image_size, 2), dtype=np.float32)
        for place, (turn, across, down, mirror) in zip(places, uniform(keys, 4), strict=True):
            angle = math.radians(self.moves.rotate) * (2.0 * turn - 1.0)
            offsets = [2.0 * self.moves.shift * (2.0 * drawn - 1.0) for drawn in (across, down)]
            if not angle:  # whole pixels: nothing is blurred
                offsets = [2.0 * round(offset * self.image_size / 2.0) / self.image_size for offset in offsets]
            left = -x if self.moves.flip and mirror < 0.5 else x
            place[..., 0] = math.cos(angle) * left - math.sin(angle) * y + offsets[0]
            place[..., 1] = math.sin(angle) * left + math.cos(angle) * y + offsets[1]
        return places
