"""Token folders: written once, complete or not there, read back as Text reads the source."""

import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dtrain.data import documents, token_stream, tokens
from dtrain.data.packed import PackedDataset
from dtrain.data.text import Text
from dtrain.data.tokens import Tokens, prepare, read_meta


def same_as_text(source: Path, out: Path, tokenizer: str | None, dtype: str) -> dict:
    """Prepare, then compare both splits with what Text gives for the same settings."""
    meta = prepare(source, out, tokenizer, val_fraction=0.2)
    written = Tokens(str(out), seq_len=8)
    direct = Text(str(source), seq_len=8, tokenizer=tokenizer, val_fraction=0.2)
    for split in ("train", "val"):
        mapped = written.dataset(split).tokens
        assert isinstance(mapped, np.memmap) and mapped.dtype == dtype
        np.testing.assert_array_equal(mapped, direct.dataset(split).tokens)
        assert meta[f"{split}_tokens"] == len(mapped)
        ours, theirs = (data.dataset(split).batch(np.array([1, 0])) for data in (written, direct))
        assert [part.tolist() for part in ours] == [part.tolist() for part in theirs]
    assert written.vocab_size == direct.vocab_size
    assert written.encode("the cat") == direct.encode("the cat")
    assert written.decode(written.encode("the cat")) == "the cat"
    assert read_meta(out) == meta and set(meta) == tokens.META_KEYS | set(tokens.DOCUMENT_KEYS)
    return meta


@pytest.mark.parametrize("source", ["folder", "small_folder"])
def test_bytes_round_trip(source: str, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    meta = same_as_text(request.getfixturevalue(source), tmp_path / "out", None, "<u2")
    assert meta["tokenizer"] is None and meta["dtype"] == "uint16"


@pytest.mark.parametrize("source", ["folder", "small_folder"])
def test_uint16_round_trip(source: str, tmp_path: Path, tokenizer_file: str, request: pytest.FixtureRequest) -> None:
    meta = same_as_text(request.getfixturevalue(source), tmp_path / "new" / "out", tokenizer_file, "<u2")
    assert meta["tokenizer"] == "tokenizer.json" and meta["dtype"] == "uint16"


@pytest.mark.parametrize("source", ["folder", "small_folder"])
def test_uint32_round_trip(
    source: str, tmp_path: Path, big_tokenizer_file: str, request: pytest.FixtureRequest
) -> None:
    meta = same_as_text(request.getfixturevalue(source), tmp_path / "out", big_tokenizer_file, "<u4")
    assert meta["dtype"] == "uint32"
    assert Tokens(str(tmp_path / "out"), seq_len=8).dataset("train").tokens.max() >= 70_000


def test_the_folder_stands_alone(folder: Path, tmp_path: Path, tokenizer_file: str) -> None:
    own = shutil.copyfile(tokenizer_file, tmp_path / "own.json")
    prepare(folder, tmp_path / "out", str(own))
    own.unlink()
    shutil.move(tmp_path / "out", tmp_path / "moved")
    assert Tokens(str(tmp_path / "moved"), seq_len=8).decode([0]) == "<|endoftext|>"


@pytest.mark.parametrize("vocab_size, dtype", [(256, "uint16"), (65536, "uint16"), (65537, "uint32")])
def test_the_type_holds_the_largest_id(vocab_size: int, dtype: str) -> None:
    assert token_stream.token_dtype(vocab_size).name == dtype
    assert np.iinfo(token_stream.token_dtype(vocab_size)).max >= vocab_size - 1


def test_prepare_does_not_hold_the_corpus(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tokens are on disk before the next batch of documents is read."""
    written: list[int] = []
    read = token_stream.read_pieces

    def watch(path: Path) -> Iterator[token_stream.Piece]:
        written.append(sum(file.stat().st_size for file in tmp_path.glob(".out.partial-*/*.bin")))
        return read(path)

    monkeypatch.setattr(token_stream, "BATCH_BYTES", 1)
    monkeypatch.setattr(token_stream, "read_pieces", watch)
    for path in folder.rglob("*.txt"):
        path.write_bytes(path.read_bytes() * 100)  # 33 kB: more than a file object buffers
    prepare(folder, tmp_path / "out")
    assert len(written) == 40 and written == sorted(written)
    assert len(set(written)) > 35


def test_prepare_overwrites_nothing(folder: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    out.mkdir()
    prepare(folder, out)  # an empty folder may be given
    before = {file.name: file.read_bytes() for file in out.iterdir()}
    with pytest.raises(ValueError, match=r"out=.* already holds a token folder"):
        prepare(folder, out, val_fraction=0.5)
    assert {file.name: file.read_bytes() for file in out.iterdir()} == before
    with pytest.raises(ValueError, match="exists and is not empty"):
        prepare(folder, folder)


@pytest.mark.parametrize("error", [OSError("disk full"), KeyboardInterrupt()])
def test_a_broken_run_leaves_nothing(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: BaseException
) -> None:
    def fail(*args: object, **kwargs: object) -> str:
        assert list(tmp_path.glob(".out.partial-*/train.bin"))  # it was well under way
        raise error

    before = sorted(tmp_path.iterdir())
    with monkeypatch.context() as patch:
        patch.setattr(json, "dumps", fail)
        with pytest.raises(type(error)):
            prepare(folder, tmp_path / "out")
    assert sorted(tmp_path.iterdir()) == before
    prepare(folder, tmp_path / "out")
    read_meta(tmp_path / "out")


def test_prepare_refuses_bad_sources(tmp_path: Path, folder: Path) -> None:
    with pytest.raises(ValueError, match=r"source=.*nowhere' does not exist"):
        prepare(tmp_path / "nowhere", tmp_path / "out")
    with pytest.raises(ValueError, match="val_fraction=-1"):
        prepare(folder, tmp_path / "out", val_fraction=-1)
    (tmp_path / "tiny.txt").write_text("a")
    with pytest.raises(ValueError, match=r"val_fraction=0.05 leaves no val tokens"):
        prepare(tmp_path / "tiny.txt", tmp_path / "out")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["documents", "tiny.txt"]


def test_bad_folders_are_refused(folder: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    meta = prepare(folder, out)
    good = {file.name: file.read_bytes() for file in out.iterdir()}

    def refused(message: str) -> None:
        for read in (lambda: tokens.check(path=str(out), seq_len=8), lambda: Tokens(str(out), seq_len=8)):
            with pytest.raises(ValueError, match=message) as caught:
                read()
            assert f"data.path={str(out)!r}" in str(caught.value)
        for name, data in good.items():
            (out / name).write_bytes(data)
        tokens.check(path=str(out), seq_len=8)

    (out / "val.bin").write_bytes(good["val.bin"][:-2])
    refused(f"val.bin has {len(good['val.bin']) - 2} bytes, meta.json says {len(good['val.bin'])}")
    (out / "train.bin").unlink()
    refused("train.bin is missing")
    (out / "val.starts").unlink()
    refused("val.starts is missing")
    (out / "meta.json").unlink()
    refused("has no meta.json")
    (out / "meta.json").write_text("{")
    refused("meta.json that cannot be read")
    (out / "meta.json").write_text("[]")
    refused("meta.json without dtype")
    (out / "meta.json").write_text(json.dumps({**meta, "dtype": "float32"}))
    refused("dtype='float32'")
    (out / "meta.json").write_text(json.dumps({k: v for k, v in meta.items() if k != "vocab_size"}))
    refused("without vocab_size")
    with pytest.raises(ValueError, match="nowhere' is not a folder\n  fix: write one with"):
        tokens.check(path=str(tmp_path / "nowhere"))


def test_packed_documents_are_those_of_the_text(folder: Path, small_folder: Path, tmp_path: Path) -> None:
    for source in (folder, small_folder):
        out = tmp_path / f"{source.name}-tokens"
        meta = prepare(source, out, val_fraction=0.2)
        written = Tokens(str(out), seq_len=100, packed=True)
        direct = Text(str(source), seq_len=100, val_fraction=0.2, packed=True)
        for split in ("train", "val"):
            ours, theirs = written.dataset(split), direct.dataset(split)
            assert isinstance(ours, PackedDataset) and ours.masked
            assert ours.fingerprint == theirs.fingerprint != Tokens(str(out), 100).dataset(split).fingerprint
            everything = np.arange(len(ours))
            for a, b in zip(ours.batch(everything), theirs.batch(everything), strict=True):
                assert a.tolist() == b.tolist()
    assert meta["train_documents"] + meta["val_documents"] == 4  # 3, and one of them is cut


def test_a_folder_without_boundaries_still_loads_but_cannot_be_packed(folder: Path, tmp_path: Path) -> None:
    """As written before there was data.packed."""
    out = tmp_path / "out"
    meta = prepare(folder, out)
    before = Tokens(str(out), seq_len=8).dataset("train").fingerprint
    (out / "meta.json").write_text(json.dumps({key: meta[key] for key in tokens.META_KEYS}))
    for file in out.glob("*.starts"):
        file.unlink()
    tokens.check(path=str(out), seq_len=8, packed=False)
    assert Tokens(str(out), seq_len=8).dataset("train").fingerprint == before
    for refused in (lambda: tokens.check(path=str(out), packed=True), lambda: Tokens(str(out), 8, packed=True)):
        with pytest.raises(ValueError, match=r"(?s)data.packed=true needs .*fix: data.packed=false, or write one"):
            refused()


def test_prepare_takes_json_lines_and_streams_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    texts = [f"document {n} " * 50 for n in range(200)]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"body": text}) + "\n" for text in texts))
    written: list[int] = []
    real = documents.document

    def watch(*arguments: Any) -> bytes:
        written.append(sum(file.stat().st_size for file in tmp_path.glob(".out.partial-*/*.bin")))
        return real(*arguments)

    monkeypatch.setattr(token_stream, "BATCH_BYTES", 1)
    monkeypatch.setattr(documents, "document", watch)
    meta = prepare(tmp_path / "a.jsonl", tmp_path / "out", val_fraction=0.2, field="body")
    assert len(set(written)) > 10, "tokens are on disk before the last line is read"
    assert meta["train_documents"] + meta["val_documents"] == 200
    written_to = Tokens(str(tmp_path / "out"), seq_len=8)
    found = [written_to.dataset(split).tokens.astype(np.uint8).tobytes().split(b"\0") for split in ("train", "val")]
    assert sorted(found[0] + found[1]) == sorted(text.encode() for text in texts)
    assert [len(part) for part in found] == [meta["train_documents"], meta["val_documents"]]


def test_short_split_and_unknown_split(folder: Path, tmp_path: Path) -> None:
    prepare(folder, tmp_path / "out")
    with pytest.raises(ValueError, match="the val split has"):
        Tokens(str(tmp_path / "out"), seq_len=100_000).dataset("val")
    with pytest.raises(ValueError, match="split='dev'"):
        Tokens(str(tmp_path / "out"), seq_len=8).dataset("dev")


def test_a_folder_that_is_a_link_or_this_one_is_kept(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "empty")
    prepare(folder, tmp_path / "link")
    assert read_meta(tmp_path / "empty") and (tmp_path / "link").is_symlink()
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    inode = os.stat(".").st_ino
    prepare(folder, Path("."))
    assert read_meta(".") == read_meta(tmp_path / "empty") and os.stat(tmp_path / "here").st_ino == inode
    names = {"meta.json", "train.bin", "val.bin", "train.starts", "val.starts"}
    assert {path.name for path in (tmp_path / "here").iterdir()} == names
    (tmp_path / "later").symlink_to(tmp_path / "not" / "yet")
    prepare(folder, tmp_path / "later")
    assert read_meta(tmp_path / "not" / "yet")
