"""Mutated data files of every kind: a ValueError with a fix, or samples; nothing else, and in little memory."""

from __future__ import annotations

import gzip
import io
import json
import random
import shutil
import struct
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from dtrain.data import mnist, text_classification
from dtrain.data.images import Images
from dtrain.data.text import Text
from dtrain.data.tokens import Tokens, prepare

TEXTS = [f"the {n} cats and the {n * n} mats" for n in range(24)]
Reader = Callable[[Path], object]


def overwrite(path: Path, data: bytes) -> None:
    """Not from nothing: ext4 flushes a file that is emptied and written again."""
    with open(path, "r+b" if path.exists() else "wb") as out:
        out.write(data)
        out.truncate()


def mutated(data: bytes, draw: random.Random) -> bytes:
    """Some bytes changed, a part twice or gone, a number replaced by one that hurts, or the end cut off."""
    for _ in range(draw.randrange(1, 4)):
        at, kind = draw.randrange(len(data) or 1), draw.randrange(6)
        if kind == 0:
            data = data[:at] + bytes([draw.randrange(256)]) + data[at + 1 :]
        elif kind == 1:
            data = data[:at] + data[at + draw.randrange(1, 64) :]
        elif kind == 2:
            data = data[:at] + data[at : at + draw.randrange(1, 64)] * draw.randrange(2, 5) + data[at:]
        elif kind == 3:
            hurts = draw.choice([b"\xff" * 8, bytes(8), struct.pack("<q", 2**40), struct.pack(">I", 2**31 - 1)])
            data = data[:at] + hurts + data[at + len(hurts) :]
        elif kind == 4:
            words = [
                b"-1",
                b"1e30",
                b"null",
                b"true",
                b'"x"',
                b"[]",
                b"{}",
                b"9" * 40,
                b"\xed\xa0\x80",
                b'"\\ud800"',
                b"NaN",
            ]
            data = data[:at] + draw.choice(words) + data[at + draw.randrange(4) :]
        else:
            data = data[: at if draw.random() < 0.3 else len(data)]
    return data


def fuzz(files: list[Path], read: Reader, seeds: int, least: int) -> None:
    """Change one of the files, read, and put it back."""
    whole = {path: path.read_bytes() for path in files}
    read(files[0])
    accepted = 0
    for seed in range(seeds):
        draw = random.Random(f"{files[0].name}/{seed}")
        path = draw.choice(files)
        overwrite(path, mutated(whole[path], draw))
        try:
            read(path)
            accepted += 1
        except ValueError as error:
            assert "fix: " in str(error) and len(str(error)) < 3000, f"seed {seed}: {error}"
        overwrite(path, whole[path])
    assert accepted >= least, f"only {accepted} of {seeds} were read"


@pytest.fixture
def seeds(request: pytest.FixtureRequest) -> int:
    return 5_000 if request.config.getoption("--all") else 250


def test_json_lines(tmp_path: Path, seeds: int, tokenizer_file: str) -> None:
    plain, packed = tmp_path / "a.jsonl", tmp_path / "b.jsonl.gz"
    plain.write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS))
    packed.write_bytes(gzip.compress(plain.read_bytes()))

    def read(path: Path) -> None:
        tokens = Text(str(path), 8, tokenizer=tokenizer_file).dataset("train").tokens
        assert len(tokens) <= 4 * path.stat().st_size * (100 if path.suffix == ".gz" else 1)

    fuzz([plain], read, seeds, least=20)
    fuzz([packed], read, seeds, least=1)


def test_labels(tmp_path: Path, seeds: int) -> None:
    file = tmp_path / "a.jsonl"
    lines = [json.dumps({"text": text, "label": "ab"[n % 2]}) for n, text in enumerate(TEXTS)]
    file.write_text("\n".join(lines))

    def read(path: Path) -> None:
        for records in text_classification.read_splits(str(path), 0.2).values():
            assert all(isinstance(r.text, str) and r.text and isinstance(r.label, (str, int)) for r in records)

    fuzz([file], read, seeds, least=20)


def test_token_folders(tmp_path: Path, seeds: int) -> None:
    source = tmp_path / "a.jsonl"
    source.write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS))
    prepare(source, tmp_path / "out")

    def read(path: Path) -> None:
        data = Tokens(str(path.parent), 16, packed=True).dataset("train")
        inputs, targets = data.batch(np.arange(min(4, len(data))))
        assert inputs.shape[1:] == (16, 2) and targets.shape[1:] == (16,)

    fuzz([tmp_path / "out" / name for name in ("meta.json", "train.starts")], read, seeds, least=5)


def test_tokenizers(tmp_path: Path, seeds: int, tokenizer_file: str) -> None:
    text, copy = tmp_path / "a.txt", tmp_path / "tokenizer.json"
    text.write_text("\n".join(TEXTS))
    shutil.copyfile(tokenizer_file, copy)
    fuzz([copy], lambda path: Text(str(text), 8, tokenizer=str(path)).dataset("train"), seeds, least=5)


def test_idx_files(tmp_path: Path, seeds: int) -> None:
    plain, packed = tmp_path / "train-images-idx3-ubyte", tmp_path / "train-images-idx3-ubyte.gz"
    plain.write_bytes(bytes([0, 0, 8, 3]) + struct.pack(">3I", 4, 5, 5) + bytes(range(100)))
    packed.write_bytes(gzip.compress(plain.read_bytes()))

    def read(path: Path) -> None:
        values = mnist.read_idx(path, 3)
        assert values.ndim == 3 and values.size <= 2 * path.stat().st_size

    fuzz([plain, packed], read, seeds, least=5)


def encoded() -> Iterator[tuple[str, bytes]]:
    from PIL import Image

    pixels = np.random.default_rng(0).integers(0, 256, (24, 20, 3), dtype=np.uint8)
    for kind in ("png", "jpeg", "gif", "bmp", "tiff", "webp", "ppm"):
        out = io.BytesIO()
        Image.fromarray(pixels).save(out, kind)
        yield kind, out.getvalue()


@pytest.mark.filterwarnings("ignore")  # Pillow's, of odd metadata
def test_pictures(tmp_path: Path, seeds: int) -> None:
    pytest.importorskip("PIL")
    names = []
    for kind, data in encoded():
        for c in ("a", "b"):
            (tmp_path / c).mkdir(exist_ok=True)
            (tmp_path / c / f"p.{kind}").write_bytes(data)
        names.append(tmp_path / "a" / f"p.{kind}")
    images = Images(str(tmp_path), 8, val_fraction=0.01).dataset("train")

    def read(path: Path) -> None:
        assert images.read(f"a/{path.name}", None).shape == (8, 8, 3)

    fuzz(names, read, 2 * seeds, least=20)


def test_saved_datasets(tmp_path: Path, seeds: int) -> None:
    datasets = pytest.importorskip("datasets")
    datasets.Dataset.from_dict({"text": TEXTS}).save_to_disk(tmp_path / "saved")
    files = [tmp_path / "saved" / name for name in ("state.json", "dataset_info.json")]
    files += list((tmp_path / "saved").glob("*.arrow"))

    def read(path: Path) -> None:
        assert len(Text(str(tmp_path / "saved"), 8).dataset("train").tokens) < 2**16

    fuzz(files, read, seeds, least=5)
