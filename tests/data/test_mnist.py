"""MNIST and CIFAR-10 from files that the tests write: what is in them comes out, and what is damaged is refused."""

from __future__ import annotations

import gzip
from pathlib import Path

import numpy as np
import pytest
import torch

from dtrain.data import cifar, mnist
from dtrain.data.cifar import Cifar10
from dtrain.data.mnist import Mnist


def idx(values: np.ndarray) -> bytes:
    header = bytes([0, 0, 8, values.ndim]) + b"".join(n.to_bytes(4, "big") for n in values.shape)
    return header + values.astype(np.uint8).tobytes()


def write_mnist(folder: Path, pack: bool = False, dot: bool = False) -> dict[str, np.ndarray]:
    """12 and 6 random pictures, with classes 0 to 9; as they are published, or as some archives have them."""
    folder.mkdir(parents=True, exist_ok=True)
    random = np.random.default_rng(0)
    arrays = {}
    for part, count in (("train", 12), ("t10k", 6)):
        arrays[f"{part}-images-idx3-ubyte"] = random.integers(0, 256, (count, 28, 28), dtype=np.uint8)
        arrays[f"{part}-labels-idx1-ubyte"] = np.arange(count, dtype=np.uint8) % 10
    for name, values in arrays.items():
        name = name.replace("-idx", ".idx") if dot else name
        if pack:
            (folder / f"{name}.gz").write_bytes(gzip.compress(idx(values)))
        else:
            (folder / name).write_bytes(idx(values))
    return arrays


@pytest.mark.parametrize(("pack", "dot", "inside"), [(False, False, ""), (True, False, "MNIST/raw"), (False, True, "")])
def test_mnist_comes_out_as_it_was_written(tmp_path: Path, pack: bool, dot: bool, inside: str) -> None:
    arrays = write_mnist(tmp_path / inside, pack, dot)
    assert mnist.check(str(tmp_path), 28) == {"num_classes": 10}
    data = Mnist(str(tmp_path), image_size=28)
    for split, part in (("train", "train"), ("val", "t10k")):
        dataset = data.dataset(split)
        x, y = dataset.batch(np.arange(len(dataset)))
        pictures = arrays[f"{part}-images-idx3-ubyte"]
        expected = (torch.from_numpy(pictures.astype(np.float32)) / 255 - 0.1307) / 0.3081
        torch.testing.assert_close(x[:, 0], expected)
        assert y.tolist() == arrays[f"{part}-labels-idx1-ubyte"].tolist()


def test_mnist_that_is_missing_or_damaged_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="not a folder\n  fix: "):
        mnist.check(str(tmp_path / "none"), 28)
    arrays = write_mnist(tmp_path)
    images = tmp_path / "train-images-idx3-ubyte"
    whole = images.read_bytes()
    images.write_bytes(whole[:-5])
    with pytest.raises(
        ValueError, match=r"train-images-idx3-ubyte: is shorter or longer than its header says(.|\n)*fix: download it"
    ):
        mnist.check(str(tmp_path), 28)
    images.write_bytes(whole[:9])
    with pytest.raises(ValueError, match="is not an idx file of bytes in 3 dimensions"):
        mnist.check(str(tmp_path), 28)
    images.unlink()
    with pytest.raises(ValueError, match=r"has no train-images-idx3-ubyte or train-images-idx3-ubyte.gz\n  fix: "):
        mnist.check(str(tmp_path), 28)
    packed = gzip.compress(idx(arrays["train-images-idx3-ubyte"]))
    (tmp_path / "train-images-idx3-ubyte.gz").write_bytes(packed[: len(packed) // 2])
    assert mnist.check(str(tmp_path), 28), "what is cut off inside is not seen before it is unpacked"
    with pytest.raises(ValueError, match=r"cannot be read(.|\n)*fix: download it again"):
        Mnist(str(tmp_path), 28).dataset("train")
    (tmp_path / "train-images-idx3-ubyte.gz").write_bytes(gzip.compress(idx(arrays["t10k-images-idx3-ubyte"])))
    with pytest.raises(ValueError, match="6 images and 12 labels of train"):
        Mnist(str(tmp_path), 28).dataset("train")


def write_cifar(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    random = np.random.default_rng(0)
    for i, name in enumerate([*cifar.FILES["train"], *cifar.FILES["val"]]):
        records = random.integers(0, 256, (2, cifar.RECORD), dtype=np.uint8)
        records[:, 0] = i, 9 - i
        (folder / name).write_bytes(records.tobytes())


def test_cifar_comes_out_as_it_was_written(tmp_path: Path) -> None:
    write_cifar(tmp_path / "cifar-10-batches-bin")
    assert cifar.check(str(tmp_path), 32) == {"num_classes": 10}
    data = Cifar10(str(tmp_path), image_size=32, flip=False)
    x, y = data.dataset("train").batch(np.arange(10))
    assert y.tolist() == [0, 9, 1, 8, 2, 7, 3, 6, 4, 5]
    raw = np.fromfile(tmp_path / "cifar-10-batches-bin" / "data_batch_2.bin", dtype=np.uint8)[1:3073]
    red = (raw[:1024].reshape(32, 32) / 255 - 0.4914) / 0.2470
    np.testing.assert_allclose(x[2, 0].numpy(), red, atol=1e-5)
    gray, _ = Cifar10(str(tmp_path), 16, channels=1).dataset("val").batch(np.array([0]))
    assert gray.shape == (1, 1, 16, 16)


def test_cifar_that_is_missing_damaged_or_pickled_is_refused(tmp_path: Path) -> None:
    folder = tmp_path / "cifar-10-batches-bin"
    write_cifar(folder)
    (folder / "data_batch_3.bin").write_bytes(b"x" * 4000)
    with pytest.raises(ValueError, match=r"data_batch_3.bin has 4000 bytes(.|\n)*fix: unpack"):
        cifar.check(str(tmp_path), 32)
    (folder / "data_batch_3.bin").unlink()
    with pytest.raises(ValueError, match=r"has no data_batch_3.bin\n  fix: "):
        cifar.check(str(tmp_path), 32)
    pickled = tmp_path / "other"
    (pickled / "cifar-10-batches-py").mkdir(parents=True)
    with pytest.raises(ValueError, match=r"pickled, (.|\n)*fix: use the binary version, cifar-10-binary.tar.gz"):
        cifar.check(str(pickled), 32)


def test_a_header_that_says_too_much_is_refused(tmp_path: Path) -> None:
    """numpy's own words would say nothing of the file; and no memory is asked for."""
    for shape in ((2**31, 2**31, 2**31), (0, 2**32 - 1, 2**32 - 1)):
        header = bytes([0, 0, 8, 3]) + b"".join(n.to_bytes(4, "big") for n in shape)
        path = tmp_path / "train-images-idx3-ubyte.gz"
        path.write_bytes(gzip.compress(header + b"x" * 100))
        if shape[0]:
            with pytest.raises(
                ValueError, match=r"gz: is shorter or longer than its header says(.|\n)*fix: download it"
            ):
                mnist.read_idx(path, 3, header_only=True)
        else:
            assert mnist.read_idx(path, 3, header_only=True).size == 0
        with pytest.raises(ValueError, match=r"gz: is shorter or longer than its header says"):
            mnist.read_idx(path, 3)
