"""Folders of pictures: classes by name, parts and mirrors by key, what is held out, files that cannot be read."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from dtrain.data import images
from dtrain.data.counter_rng import sample_keys
from dtrain.data.images import Images, middle, part
from tests.patience import patience

RED, BLUE = (220, 30, 30), (30, 30, 220)


def draw(path: Path, colour: tuple[int, int, int], size: tuple[int, int] = (40, 30)) -> None:
    """A picture whose left half has the colour and whose right half is gray."""
    path.parent.mkdir(parents=True, exist_ok=True)
    picture = Image.new("RGB", size, (128, 128, 128))
    picture.paste(colour, (0, 0, size[0] // 2, size[1]))
    picture.save(path, **({"quality": 95} if path.suffix.lower() in (".jpg", ".jpeg") else {}))


@pytest.fixture
def two_levels(tmp_path: Path) -> Path:
    for split, count in (("train", 4), ("val", 2)):
        for i in range(count):
            draw(tmp_path / split / "red" / f"{i}.jpg", RED)
            draw(tmp_path / split / "blue" / f"{i}.PNG", BLUE, (30, 40))
    (tmp_path / "train" / "red" / "notes.txt").write_text("no picture")
    return tmp_path


def test_classes_are_the_folders_in_order(two_levels: Path) -> None:
    assert images.check(str(two_levels), 16) == {"num_classes": 2}
    data = Images(str(two_levels), image_size=16, mean=[0.0], std=[1.0])
    train, val = data.dataset("train"), data.dataset("val")
    assert data.classes == ["blue", "red"] and (len(train), len(val)) == (8, 4)
    x, y = val.batch(np.arange(4))
    assert x.shape == (4, 3, 16, 16) and x.dtype == torch.float32 and y.tolist() == [0, 0, 1, 1]
    assert x[0, 2, 8, 1] > 0.7 and x[0, 0, 8, 1] < 0.2, "blue at the left"
    torch.testing.assert_close(x[0, :, 8, 14], torch.full((3,), 128 / 255), rtol=0, atol=0.02)


def test_normalised_gray_and_draws(two_levels: Path) -> None:
    plain, normal, gray = (
        Images(str(two_levels), 16, **kw).dataset("train")  # type: ignore[arg-type]
        for kw in ({"mean": [0.0], "std": [1.0]}, {}, {"channels": 1, "mean": [0.5], "std": [2.0]})
    )
    indices = np.arange(8)
    keys = sample_keys(0, 0, indices)
    x, _ = plain.batch(indices, keys)
    y, _ = normal.batch(indices, keys)
    mean, std = torch.tensor([0.485, 0.456, 0.406]), torch.tensor([0.229, 0.224, 0.225])
    torch.testing.assert_close(y, (x - mean[:, None, None]) / std[:, None, None])
    assert gray.batch(indices, keys)[0].shape == (8, 1, 16, 16)
    assert not torch.equal(plain.batch(indices, sample_keys(0, 1, indices))[0], x), "another epoch, another part"
    alone = plain.batch(indices[5:6], keys[5:6])[0]
    assert torch.equal(alone[0], x[5]), "whatever else is in the batch"


def test_half_of_the_pictures_are_mirrored(two_levels: Path) -> None:
    keys = sample_keys(0, 0, np.arange(200))
    same = np.zeros(200, dtype=np.int64)  # one picture, 200 keys
    count = {}
    for flip in (True, False):
        dataset = Images(str(two_levels), 8, crop_scale=[1.0, 1.0], flip=flip, mean=[0.0], std=[1.0]).dataset("train")
        blue = dataset.batch(same, keys)[0][:, 2]
        count[flip] = int((blue[:, :, 0].mean(1) > blue[:, :, -1].mean(1)).sum())
    assert count[False] == 200 and 70 < count[True] < 130


def test_a_large_jpeg_is_decoded_small_and_looks_the_same(tmp_path: Path) -> None:
    for name in ("a", "b"):
        draw(tmp_path / name / "x.jpg", RED, (1600, 1200))
        draw(tmp_path / name / "y.png", RED, (1600, 1200))
    dataset = Images(str(tmp_path), 32, val_fraction=0.01, mean=[0.0], std=[1.0]).dataset("train")
    both = {name: dataset.read(name, None).astype(int) for name in ("a/x.jpg", "a/y.png")}
    assert np.abs(both["a/x.jpg"] - both["a/y.png"]).max() < 12


def test_one_level_holds_out_by_name(tmp_path: Path) -> None:
    for i in range(30):
        draw(tmp_path / ("red" if i % 2 else "blue") / f"{i}.png", RED if i % 2 else BLUE, (4, 4))
    data = Images(str(tmp_path), 4, val_fraction=0.3)
    train, val = data.dataset("train"), data.dataset("val")
    assert len(train) + len(val) == 30 and 3 <= len(val) <= 15 and not set(train.names) & set(val.names)
    before, fingerprint = set(val.names), train.fingerprint
    draw(tmp_path / "red" / "new.png", RED, (4, 4))
    later = Images(str(tmp_path), 4, val_fraction=0.3)
    assert before <= set(later.dataset("val").names) | {"red/new.png"}, "what was held out still is"
    assert later.dataset("train").fingerprint + later.dataset("val").fingerprint != fingerprint + val.fingerprint


@settings(max_examples=100, deadline=None)
@given(st.integers(1, 5000), st.integers(1, 5000), st.lists(st.floats(0, 0.999), min_size=5, max_size=5))
def test_a_part_lies_inside_its_picture(width: int, height: int, drawn: list[float]) -> None:
    for left, top, right, bottom in (
        part(width, height, (0.08, 1.0), np.array(drawn)),
        part(width, height, (1.0, 1.0), np.array(drawn)),
        middle(width, height, 0.875),
    ):
        assert 0 <= left < right <= width and 0 <= top < bottom <= height
    left, top, right, bottom = part(width, height, (0.25, 0.25), np.array(drawn))
    if min(width, height) > 8 and 0.5 < width / height < 2:
        assert (right - left) * (bottom - top) == pytest.approx(0.25 * width * height, rel=1e-6)
        assert 0.749 < (right - left) / (bottom - top) < 1.334


def test_a_picture_that_cannot_be_read_is_named(two_levels: Path) -> None:
    dataset = Images(str(two_levels), 8).dataset("val")
    path = two_levels / "val" / "red" / "1.jpg"
    whole = path.read_bytes()
    for damaged in (b"", b"not a picture", whole[: len(whole) // 2]):
        path.write_bytes(damaged)
        with pytest.raises(ValueError, match=r"the image .*val/red/1.jpg cannot be read .*\n  fix: replace it"):
            dataset.batch(np.array([3]))
    Image.fromarray(np.full((4, 4), 40000, dtype=np.uint16)).save(two_levels / "val" / "blue" / "0.PNG", format="PNG")
    with pytest.raises(ValueError, match=r"0.PNG cannot be read \(its pixels have more than 8 bits"):
        dataset.batch(np.array([0]))


def test_folders_and_settings_that_cannot_work_are_refused(tmp_path: Path, two_levels: Path) -> None:
    def refused(match: str, path: Path = two_levels, **changes: object) -> None:
        with pytest.raises(ValueError, match=f"{match}(.|\n)*\n  fix: "):
            images.check(**({"path": str(path), "image_size": 8} | changes))  # type: ignore[arg-type]

    refused("data.path=.*none: is not a folder", tmp_path / "none")
    refused("data.path=.*red: has 0 folders", two_levels / "train" / "red")
    refused("data.crop_scale", crop_scale=[0.5, 0.2])
    refused("data.val_crop=0", val_crop=0.0)
    refused("data.std", std=[0.0])
    refused("model.channels=4", channels=4)
    draw(two_levels / "val" / "green" / "0.png", RED)
    refused("val/green is not a class of train")
    (two_levels / "train" / "empty").mkdir()
    refused("there is no image in .*empty")
    (two_levels / "train" / "empty").rmdir()
    (two_levels / "val").rename(two_levels / "test")
    refused("has train/ but no val/")


def test_a_check_imports_no_torch_and_decodes_nothing(two_levels: Path) -> None:
    for path in two_levels.rglob("*.jpg"):
        path.write_bytes(b"damaged")
    code = f"""
import sys
from dtrain.data import cifar, digits, images, mnist
assert images.check({str(two_levels)!r}, 8) == {{"num_classes": 2}}
assert digits.check(8) == {{"num_classes": 10}}
assert not {{"torch", "PIL", "sklearn"}} & set(sys.modules), "too much was imported"
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=patience(60))


def test_folders_below_a_class_are_searched_and_what_is_left_out_is_said(
    two_levels: Path, caplog: pytest.LogCaptureFixture
) -> None:
    draw(two_levels / "train" / "red" / "more" / "deep" / "9.png", RED)
    draw(two_levels.parent / f"{two_levels.name}-elsewhere" / "8.png", RED)
    (two_levels / "train" / "red" / "linked").symlink_to(two_levels.parent / f"{two_levels.name}-elsewhere")
    (two_levels / "train" / "red" / "loop").symlink_to(two_levels / "train" / "red")
    (two_levels / "train" / "red" / "x.heic").touch()
    dataset = Images(str(two_levels), 8).dataset("train")
    assert [n for n in dataset.names if n.count("/") > 1] == ["red/linked/8.png", "red/more/deep/9.png"]
    assert len(dataset) == 10 and dataset.batch(np.arange(10))[1].tolist() == [0] * 4 + [1] * 6
    assert "skipped 2 files" in caplog.text and "red/notes.txt" in caplog.text
    (two_levels / "train" / "green" / "below").mkdir(parents=True)
    (two_levels / "train" / "green" / "below" / "x.heic").touch()
    with pytest.raises(ValueError, match=r"there is no image in .*green(.|\n)*\n  fix: "):
        images.check(str(two_levels), 8)


def test_a_link_to_nothing_is_named(two_levels: Path) -> None:
    (two_levels / "val" / "red" / "5.jpg").symlink_to(two_levels / "nowhere.jpg")
    with pytest.raises(ValueError, match=r"the image .*5.jpg cannot be read (.|\n)*\n  fix: "):
        _ = Images(str(two_levels), 8).dataset("val").fingerprint


def test_a_class_of_few_pictures_is_trained() -> None:
    lowest = min((f"rare/{n}.jpg" for n in range(50)), key=images.hash_share)
    held_out = images.choose([lowest, *(f"often/{n}.jpg" for n in range(20))], 0.2)
    assert held_out and lowest not in held_out
