"""Your own images, a folder per class: train/CLASS/*.jpg and val/CLASS/*.jpg, or CLASS/*.jpg. Needs Pillow.

Training uses a crop of random size and place, mirrored half of the time; validation uses the centre. All of it depends
only on the sample's key, so every layout and every resume sees the same.
"""

from __future__ import annotations

import functools
import hashlib
import inspect
import math
import os
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

import numpy as np

from dtrain.data.files import walk, warn
from dtrain.data.small_images import check_shape, uniform
from dtrain.data.token_stream import check_split, hash_share, hold_out
from dtrain.errors import bad
from dtrain.util.regular_file import open_regular

if TYPE_CHECKING:
    from torch import Tensor

ENDINGS = (".jpg", ".jpeg", ".png", ".webp", ".bmp", ".gif", ".tif", ".tiff", ".ppm", ".pgm")
KINDS = ("JPEG", "PNG", "WEBP", "BMP", "GIF", "TIFF", "PPM", "MPO", "AVIF", "JPEG2000")
LARGEST = 89_478_485  # pixels: where Pillow begins to warn of a decompression bomb; decoded, they take 256 MiB
RATIO = 4 / 3  # largest aspect ratio of a crop, either way
TARGET = "dtrain.data.images.Images"
Box = tuple[float, float, float, float]


def class_names(folder: Path) -> list[str]:
    """Return the folders in a folder, sorted: an image's class is the index of its folder."""
    return sorted(e.name for e in os.scandir(folder) if e.is_dir() and not e.name.startswith("."))


def is_picture(name: str) -> bool:
    return name.lower().endswith(ENDINGS)


def pictures_in(folder: Path) -> tuple[list[str], list[str]]:
    """Return the images of a class, including subfolders, and the files with other name endings; both sorted."""
    names: list[str] = []
    for below, files in walk(folder):
        names += files if below == "." else [f"{below}/{name}" for name in files]
    return sorted(filter(is_picture, names)), sorted(name for name in names if not is_picture(name))


def has_picture(folder: Path) -> bool:
    return any(is_picture(name) for _, files in walk(folder) for name in files)


def check(
    path: str,
    image_size: int,
    channels: int = 3,
    val_fraction: float = 0.1,
    crop_scale: Sequence[float] = (0.08, 1.0),
    flip: bool = True,
    val_crop: float = 0.875,
    mean: Sequence[float] = (0.0,),
    std: Sequence[float] = (1.0,),
) -> dict[str, int]:
    """Refuse settings and folders that cannot work, without decoding an image; return the model's required settings."""
    Decoding(image_size, channels, crop_scale, flip, val_crop, mean, std)
    check_share("val_fraction", val_fraction)
    root = Path(path).expanduser()
    if not root.is_dir():
        raise bad("data.path", path, "is not a folder", "give a folder that has a folder for each class")
    own_val = (root / "train").is_dir()
    classes = class_names(root / "train" if own_val else root)
    for folder in (root / "train" / c if own_val else root / c for c in classes):
        if not has_picture(folder):
            fix = f"a folder with a folder for each class, with images in each ({' '.join(ENDINGS)})"
            raise bad("data.path", path, f"there is no image in {folder}", fix)
    if len(classes) < 2:
        rule = f"has {len(classes)} folders of images, but needs one for each of two or more classes"
        raise bad(
            "data.path", path, rule, f"{path}/train/CLASS/*.jpg and {path}/val/CLASS/*.jpg, or {path}/CLASS/*.jpg"
        )
    if own_val:
        if not (root / "val").is_dir():
            raise bad("data.path", path, "has train/ but no val/", f"add {path}/val, or move the classes out of train/")
        others = sorted(set(class_names(root / "val")) - set(classes))
        if others:
            raise bad(
                "data.path", path, f"val/{others[0]} is not a class of train/", "use the same class folders in both"
            )
    return {"num_classes": len(classes)}


def check_share(name: str, share: float) -> None:
    if not 0 < share <= 1:
        raise bad(f"data.{name}", share, "must be a share: more than 0 and at most 1", f"data.{name}=0.1")


class Images:
    """Classes are the folder names, sorted. Without train/ and val/, a hash of its name decides what is held out."""

    def __init__(
        self,
        path: str,
        image_size: int,
        channels: int = 3,
        val_fraction: float = 0.1,
        crop_scale: Sequence[float] = (0.08, 1.0),
        flip: bool = True,
        val_crop: float = 0.875,
        mean: Sequence[float] = (0.485, 0.456, 0.406),
        std: Sequence[float] = (0.229, 0.224, 0.225),
    ) -> None:
        check(path, image_size, channels, val_fraction, crop_scale, flip, val_crop, mean, std)
        self.root, self.path, self.val_fraction = Path(path).expanduser(), path, val_fraction
        self.decoding = Decoding(image_size, channels, crop_scale, flip, val_crop, mean, std)
        self.own_val = (self.root / "train").is_dir()
        self.classes = class_names(self.root / "train" if self.own_val else self.root)

    def dataset(self, split: str) -> ImageDataset:
        """The samples of "train" or "val"."""
        check_split(split)
        root = self.root / split if self.own_val else self.root
        names, others = [], []
        for c in self.classes:
            pictures, rest = pictures_in(root / c)
            names += [f"{c}/{name}" for name in pictures]
            others += [f"{c}/{name}" for name in rest]
        if others and (self.own_val or split == "train"):  # once, not for each split
            warn(f"data.path={root}: skipped {len(others)} files without an image extension: {others[0]} …")
        if not self.own_val:
            held_out = choose(names, self.val_fraction)
            names = [name for name in names if (name in held_out) == (split == "val")]
        if not names:
            raise bad("data.path", self.path, f"there is no image for {split}", "add images, or data.val_fraction=0.1")
        return ImageDataset(self, root, names, train=split == "train")


def choose(names: list[str], share: float) -> set[str]:
    """Return the held-out names, by their hash alone; at least one, and never all of a class."""
    held_out = hold_out([*map(hash_share, names)], [name.partition("/")[0] for name in names], share)
    return {name for name, held in zip(names, held_out, strict=True) if held}


class ImageDataset:
    """One image at a time, decoded when requested."""

    def __init__(self, data: Images, root: Path, names: list[str], train: bool) -> None:
        self.root, self.names, self.decoding, self.draws = root, names, data.decoding, train
        number = {name: i for i, name in enumerate(data.classes)}
        self.labels = np.array([number[name.partition("/")[0]] for name in names], dtype=np.int64)

    def __len__(self) -> int:
        return len(self.names)

    @property
    def fingerprint(self) -> str:
        """Identifies the images: a hash of all names, and of the sizes of up to 256 files."""
        digest = hashlib.sha256("\n".join(self.names).encode("utf-8", "surrogateescape"))
        for i in np.linspace(0, len(self) - 1, min(len(self), 256)).astype(np.int64):
            try:
                size = os.path.getsize(self.root / self.names[i])
            except OSError as error:  # a dangling link
                raise unreadable(self.root / self.names[i], error) from error
            digest.update(f"{size} ".encode())
        return digest.hexdigest()[:16]

    def batch(self, indices: np.ndarray, keys: np.ndarray | None = None) -> tuple[Tensor, Tensor]:
        import torch

        indices = np.asarray(indices)
        draws = uniform(keys, 5) if keys is not None and self.draws else [None] * len(indices)
        pictures = [self.read(self.names[i], drawn) for i, drawn in zip(indices, draws, strict=True)]
        return self.decoding.normalized(pictures), torch.from_numpy(self.labels[indices])

    def read(self, name: str, drawn: np.ndarray | None) -> np.ndarray:
        """Return one image as [size, size, channels] in 8 bits."""
        path = self.root / name
        try:
            with open_regular(path) as file:  # a FIFO would never end
                return self.decoding.decode(file, drawn)
        except Exception as error:  # a decoder can raise anything for damaged bytes
            raise unreadable(path, error) from error


class Decoding:
    """How an image file becomes an input. It needs the settings of `data` alone, and not the folder of images."""

    def __init__(
        self,
        image_size: int,
        channels: int,
        crop_scale: Sequence[float],
        flip: bool,
        val_crop: float,
        mean: Sequence[float],
        std: Sequence[float],
    ) -> None:
        check_shape(image_size, channels)
        if len(crop_scale) != 2 or not 0 < crop_scale[0] <= crop_scale[1] <= 1:
            rule = "must be the smallest and the largest share of an image's area, more than 0 and at most 1"
            raise bad("data.crop_scale", list(crop_scale), rule, "'data.crop_scale=[0.08,1.0]'")
        check_share("val_crop", val_crop)
        for name, values in (("mean", mean), ("std", std)):
            if len(values) not in (1, 3) or (name == "std" and min(values) <= 0):
                raise bad(f"data.{name}", list(values), "must be 1 or 3 numbers (std: above 0)", f"'data.{name}=[0.5]'")
        if find_spec("PIL") is None:
            raise bad("data", "images", "needs Pillow, which is not installed", "pip install pillow")
        self.size, self.mode, self.val_crop = image_size, "RGB" if channels == 3 else "L", val_crop
        self.crop_scale, self.flip = (crop_scale[0], crop_scale[1]), flip
        self.mean, self.std = (np.array(values, dtype=np.float32) for values in (mean, std))
        if channels == 1:  # grayscale: over all three colours
            self.mean, self.std = self.mean.mean(keepdims=True), self.std.mean(keepdims=True)

    @classmethod
    def of(cls, data: Mapping[str, Any]) -> Decoding:
        """Return that of the settings of data=images."""
        return cls(**{name: data[name] for name in inspect.signature(cls).parameters})

    def normalized(self, pictures: Sequence[np.ndarray]) -> Tensor:
        import torch

        normal = (np.stack(pictures).astype(np.float32) / np.float32(255) - self.mean) / self.std
        return torch.from_numpy(np.ascontiguousarray(normal.transpose(0, 3, 1, 2)))

    def decode(self, file: IO[bytes], drawn: np.ndarray | None = None) -> np.ndarray:
        """Return the image in a file as [size, size, channels]. Damaged bytes raise an exception of any kind."""
        from PIL import Image

        with Image.open(file, formats=kinds()) as picture:  # some formats Pillow passes to programs: EPS to Ghostscript
            width, height = picture.size
            if width * height > LARGEST:
                raise ValueError(f"it has {width} x {height} pixels, and at most {LARGEST:,} are decoded")
            if picture.mode.startswith(("I", "F")):
                raise ValueError(f"its pixels have more than 8 bits ({picture.mode})")
            box = middle(width, height, self.val_crop) if drawn is None else part(width, height, self.crop_scale, drawn)
            return self.cut(picture, box, mirrored=drawn is not None and self.flip and drawn[4] < 0.5)

    def cut(self, picture: Any, box: Box, mirrored: bool) -> np.ndarray:
        from PIL import Image

        width, height = picture.size
        left, top, right, bottom = box
        # A JPEG can be decoded at a half, a quarter or an eighth of its size, in a fraction of the time: use the
        # smallest that still has all the pixels needed.
        needed = (math.ceil(width * self.size / (right - left)), math.ceil(height * self.size / (bottom - top)))
        picture.draft(self.mode, needed)
        wide, high = picture.size
        across, down = wide / width, high / height
        box = (left * across, top * down, min(right * across, wide), min(bottom * down, high))  # clips rounding errors
        result = picture.convert(self.mode).resize((self.size, self.size), Image.Resampling.BILINEAR, box)
        if mirrored:
            result = result.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
        return np.asarray(result).reshape(self.size, self.size, -1)


@functools.cache
def kinds() -> list[str]:
    """Return the allowed formats that this Pillow supports."""
    from PIL import Image

    Image.init()
    return [kind for kind in KINDS if kind in Image.OPEN]


def unreadable(path: Path, error: Exception) -> ValueError:
    unknown = type(error).__name__ == "UnidentifiedImageError"  # its text names a file handle
    why = f"its format is none of {', '.join(KINDS)}" if unknown else getattr(error, "strerror", None) or error
    return ValueError(f"data.path: the image {path} cannot be read ({why})\n  fix: replace it, or remove it")


def middle(width: int, height: int, share: float) -> Box:
    """Return the centred square whose side is this share of the shorter side."""
    side = max(1.0, share * min(width, height))
    left, top = (width - side) / 2, (height - side) / 2
    return left, top, left + side, top + side


def part(width: int, height: int, scale: tuple[float, float], drawn: np.ndarray) -> Box:
    """Return a random crop: area, aspect ratio and place are drawn; it shrinks if it does not fit."""
    area = width * height * (scale[0] + (scale[1] - scale[0]) * drawn[0])
    ratio = RATIO ** (2.0 * drawn[1] - 1.0)
    wide, high = math.sqrt(area * ratio), math.sqrt(area / ratio)
    shrink = min(1.0, width / wide, height / high)
    wide, high = min(max(1.0, wide * shrink), width), min(max(1.0, high * shrink), height)
    left, top = (width - wide) * drawn[2], (height - high) * drawn[3]
    return left, top, min(left + wide, width), min(top + high, height)
