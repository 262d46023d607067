"""The standard library as a corpus."""

import os
import sysconfig
from collections.abc import Iterator
from pathlib import Path

import pytest

from dtrain.data import token_stream
from dtrain.data.stdlib import SKIPPED, Stdlib


@pytest.fixture(scope="module")
def data() -> Stdlib:
    return Stdlib(seq_len=128)


def test_documents_are_the_library_without_tests_and_packages(data: Stdlib) -> None:
    root, names = data.source().root, data.source().names
    assert names == sorted(names) and len(names) > 300
    assert {"os.py", "json/decoder.py", "asyncio/events.py"} <= set(names)
    assert not [name for name in names if set(Path(name).parts) & SKIPPED]
    assert all((root / name).is_file() for name in names)


def test_train_and_val_are_whole_and_different_files(data: Stdlib) -> None:
    root, names = data.source().root, data.source().names
    train, val = token_stream.split_documents(names, 0.05)
    for split, files in (("train", train), ("val", val)):
        written = b"\0".join(d for name in files if (d := (root / name).read_bytes()))
        assert data.dataset(split).tokens.tobytes() == written
    assert not set(train) & set(val)


def test_sizes_are_worth_training_on(data: Stdlib) -> None:
    train, val = len(data.dataset("train").tokens), len(data.dataset("val").tokens)
    assert train > 5_000_000 and 0.01 < val / (train + val) < 0.2
    assert data.vocab_size == 256


def test_packages_in_the_library_folder_are_not_walked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("os.py", "site-packages/torch/a.py", "email/tests/b.py", "email/c.py", "test/d.py"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("pass")
    monkeypatch.setattr(sysconfig, "get_paths", lambda: {"stdlib": str(tmp_path)})
    walked: list[str] = []
    walk = os.walk

    def watch(top: Path) -> Iterator[tuple[str, list[str], list[str]]]:
        for row in walk(str(top)):
            walked.append(row[0])
            yield row

    monkeypatch.setattr(os, "walk", watch)
    assert Stdlib(seq_len=8).source().names == ["email/c.py", "os.py"]
    assert sorted(set(walked)) == [str(tmp_path), str(tmp_path / "email")]


def test_a_python_without_sources_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sysconfig, "get_paths", lambda: {"stdlib": str(tmp_path)})
    with pytest.raises(ValueError, match=r"(?s)data=stdlib needs .* use data=text"):
        Stdlib(seq_len=8)


def test_val_fraction_is_checked() -> None:
    with pytest.raises(ValueError, match=r"data.val_fraction=2"):
        Stdlib(seq_len=8, val_fraction=2)
