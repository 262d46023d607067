"""The digits inside the package: the published ones, the same split always, resized and moved by their keys alone."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dtrain.data import digits
from dtrain.data.counter_rng import sample_keys
from dtrain.data.digits import Digits
from dtrain.data.loader import Loader
from dtrain.data.small_images import Moves, PixelDataset, uniform


def test_they_are_scikit_learns() -> None:
    datasets = pytest.importorskip("sklearn.datasets")
    published = datasets.load_digits()
    with np.load(digits.FILE, allow_pickle=False) as file:
        assert np.array_equal(file["pictures"], published.images)
        assert np.array_equal(file["labels"], published.target)
    assert digits.FILE.stat().st_size < 60_000


def test_a_fifth_is_held_out_and_as_many_of_each_class() -> None:
    data = Digits(8)
    train, val = data.dataset("train"), data.dataset("val")
    assert (len(train), len(val)) == (1437, 360)
    assert np.bincount(val.labels).tolist() == [36] * 10
    both = np.concatenate([train.pictures, val.pictures]).reshape(1797, -1)
    assert len(np.unique(both, axis=0)) == 1797, "no picture is on both sides, and none is there twice"
    assert train.fingerprint == Digits(8).dataset("train").fingerprint != val.fingerprint


def test_pictures_are_normalised_and_resized() -> None:
    x, y = Digits(8).dataset("val").batch(np.arange(360))
    assert x.shape == (360, 1, 8, 8) and x.dtype == torch.float32 and y.dtype == torch.int64
    assert abs(x.mean()) < 0.05 and x.std() == pytest.approx(1.0, abs=0.05)
    large, _ = Digits(28, 3).dataset("val").batch(np.array([3, 4]))
    assert large.shape == (2, 3, 28, 28) and torch.equal(large[:, 0], large[:, 2])
    whole = torch.nn.functional.interpolate(x[3:5], (28, 28), mode="bilinear")
    torch.testing.assert_close(large[:, :1], whole, rtol=1e-4, atol=1e-4)


@settings(max_examples=20, deadline=None)
@given(st.lists(st.integers(0, 1436), min_size=1, max_size=9), st.integers(0, 3), st.sampled_from([8, 11]))
def test_a_sample_is_the_same_in_every_batch(chosen: list[int], epoch: int, size: int) -> None:
    dataset = Digits(size, shift=0.1, rotate=10.0).dataset("train")
    assert dataset.draws
    indices = np.array(chosen)
    keys = sample_keys(0, epoch, indices)
    together, _ = dataset.batch(indices, keys)
    for i in range(len(indices)):
        alone, _ = dataset.batch(indices[i : i + 1], keys[i : i + 1])
        assert torch.equal(alone[0], together[i])


def test_only_training_pictures_are_moved() -> None:
    data = Digits(8, shift=0.1, rotate=10.0)
    assert not data.dataset("val").draws and not Digits(8).dataset("train").draws
    train = data.dataset("train")
    indices = np.arange(50)
    still, first, second = (
        train.batch(indices, keys)[0] for keys in (None, sample_keys(0, 0, indices), sample_keys(0, 1, indices))
    )
    assert not torch.equal(first, second) and not torch.equal(still, first)
    assert torch.nn.functional.cosine_similarity(still.flatten(1), first.flatten(1)).mean() > 0.7, "only a little"


def test_the_loader_gives_each_epoch_other_draws() -> None:
    loader = Loader(Digits(8, shift=0.1, rotate=10.0).dataset("train"), 10, seed=0)
    again = Loader(Digits(8, shift=0.1, rotate=10.0).dataset("train"), 10, seed=0)
    for position in (0, 1430, 14370):
        assert torch.equal(loader.batch(position)[0], again.batch(position)[0])
    loader.close()
    again.close()


@settings(max_examples=30, deadline=None)
@given(st.integers(-3, 3), st.booleans(), st.integers(0, 2**64 - 1))
def test_without_turning_a_picture_is_moved_by_whole_pixels(_: int, flip: bool, key: int) -> None:
    picture = np.arange(1, 26, dtype=np.uint8).reshape(1, 1, 5, 5)
    dataset = PixelDataset(picture, np.zeros(1), 5, 1, (0.0,), (1.0,), Moves(0.4, 0.0, flip), largest=1)
    moved = dataset.batch(np.array([0]), np.array([key], dtype=np.uint64))[0][0, 0]
    turn, across, down, mirror = uniform(np.array([key], dtype=np.uint64), 4)[0]
    dx, dy = (round(0.4 * (2 * drawn - 1) * 5) for drawn in (across, down))
    expected = np.zeros((5, 5))
    for i in range(5):
        for j in range(5):
            column = (4 - j if flip and mirror < 0.5 else j) + dx
            if 0 <= i + dy < 5 and 0 <= column < 5:
                expected[i, j] = picture[0, 0, i + dy, column]
    np.testing.assert_allclose(moved.numpy(), expected, atol=1e-3)
    assert 0 <= turn < 1


def test_what_cannot_work_is_refused() -> None:
    assert digits.check(image_size=8) == {"num_classes": 10}
    for wrong, key in (({"channels": 2}, "model.channels=2"), ({"shift": 1.5}, "data.shift=1.5"),
                       ({"rotate": -1.0}, "data.rotate=-1.0"), ({"image_size": 0}, "model.image_size=0")):  # fmt: skip
        with pytest.raises(ValueError, match=f"^{key}: (.|\n)*\n  fix: "):
            digits.check(**({"image_size": 8} | wrong))  # type: ignore[arg-type]
