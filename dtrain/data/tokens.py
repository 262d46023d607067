"""Memory-mapped token files: text is tokenized once, and a run of any size reads only what it needs."""

from __future__ import annotations

import json
import os
import shutil
import uuid
from collections.abc import Iterable, Iterator
from functools import cached_property
from pathlib import Path

import numpy as np

from dtrain.data import documents, text, token_stream
from dtrain.data.packed import PackedDataset, make_dataset
from dtrain.data.token_stream import Piece, Tokenizer
from dtrain.data.windows import TokenDataset
from dtrain.formats.bounded import read_json, short

TASK = "next"  # the kind of targets (dtrain/checks/validate.py)

DTYPES: dict[str, np.dtype] = {"uint16": np.dtype("<u2"), "uint32": np.dtype("<u4")}
META_KEYS = {"dtype", "vocab_size", "tokenizer", "train_tokens", "val_tokens"}
DOCUMENT_KEYS = ("train_documents", "val_documents")  # folders written before data.packed existed have none
LARGEST_META = 2**20  # bytes
STARTS = np.dtype("<i8")  # of SPLIT.starts: where each document of SPLIT.bin starts, in tokens
HOW_TO = "write one with: dtrain data prepare SOURCE OUT"


def prepare(
    source: Path,
    out: Path,
    tokenizer: str | None = None,
    val_fraction: float = 0.05,
    pattern: str | None = None,
    field: str = "text",
) -> dict:
    """Tokenize `source` into the folder `out` (train and val .bin and .starts, meta.json), split as Text splits.

    Everything is written beside `out` and renamed at the end, so `out` is complete or missing. An existing empty folder
    is kept, because it may be a link or a mount: files are written inside, and meta.json comes last.
    """
    source, out = Path(source).expanduser(), Path(out).expanduser().resolve()  # out may be a dangling link
    text.check(str(source), tokenizer, val_fraction, pattern, field, setting="source")
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        what = "already holds a token folder" if (out / "meta.json").exists() else "exists and is not empty"
        raise ValueError(f"out={str(out)!r} {what} and is not overwritten\n  fix: remove it or choose another")
    found = documents.open_source(source, pattern, field, val_fraction)
    encoder = text.load_tokenizer(tokenizer)
    dtype = token_stream.token_dtype(encoder.vocab_size)

    there, name = out.exists(), f"partial-{uuid.uuid4().hex[:8]}"
    partial = out / f".{name}" if there else out.with_name(f".{out.name}.{name}")
    partial.mkdir(parents=True)
    try:
        counts, num_documents = {}, {}
        for split in ("train",) if found.cuts_tail else ("train", "val"):
            counts[split], num_documents[split] = _write(partial / split, found.pieces(split), encoder, dtype)
        if found.cuts_tail:
            start = token_stream.tail_start(counts["train"], val_fraction)
            counts = {"train": start, "val": counts["train"] - start}
            num_documents = _move_tail(partial, start, dtype)
        for split, count in counts.items():
            if not count:
                raise ValueError(
                    f"val_fraction={val_fraction} leaves no {split} tokens of {str(source)!r}\n  fix: "
                    "change it or add text"
                )
        if tokenizer is not None:
            shutil.copyfile(Path(tokenizer).expanduser(), partial / "tokenizer.json")
        meta = {
            "dtype": dtype.name,
            "vocab_size": encoder.vocab_size,
            "tokenizer": None if tokenizer is None else "tokenizer.json",
            "train_tokens": counts["train"],
            "val_tokens": counts["val"],
            "train_documents": num_documents["train"],
            "val_documents": num_documents["val"],
        }
        (partial / "meta.json").write_text(json.dumps(meta, indent=2) + "\n")
        if there:
            for file in sorted(partial.iterdir(), key=lambda file: file.name == "meta.json"):
                os.replace(file, out / file.name)
            partial.rmdir()
        else:
            os.replace(partial, out)
    except BaseException:  # Ctrl-C too
        shutil.rmtree(partial, ignore_errors=True)
        raise
    return meta


def _write(file: Path, pieces: Iterator[Piece], tokenizer: Tokenizer, dtype: np.dtype) -> tuple[int, int]:
    """Write a split's tokens and its documents' starts as a stream; return the number of each."""
    num_tokens = num_documents = 0
    with file.with_suffix(".bin").open("wb") as out, file.with_suffix(".starts").open("wb") as index:
        for tokens, starts in token_stream.token_stream(pieces, tokenizer):
            out.write(tokens.astype(dtype).tobytes())
            index.write(starts.astype(STARTS).tobytes())
            num_tokens, num_documents = num_tokens + len(tokens), num_documents + len(starts)
    return num_tokens, num_documents


def _move_tail(folder: Path, start: int, dtype: np.dtype) -> dict[str, int]:
    """Move the tokens from `start` on into val; return the documents of each split, which are few."""
    with (folder / "train.bin").open("r+b") as source, (folder / "val.bin").open("wb") as out:
        source.seek(start * dtype.itemsize)
        shutil.copyfileobj(source, out, 1 << 20)
        source.truncate(start * dtype.itemsize)
    nothing = np.array([], dtype=dtype)
    starts = np.fromfile(folder / "train.starts", dtype=STARTS)
    splits = dict(zip(("train", "val"), token_stream.Tokens(nothing, starts).cut(start), strict=True))
    for split, part in splits.items():
        part.starts.astype(STARTS).tofile(folder / f"{split}.starts")
    return {split: len(part.starts) for split, part in splits.items()}


def read_meta(path: str | Path) -> dict:
    """Return a token folder's meta.json, checked against the files beside it; imports no torch."""
    folder = Path(path).expanduser()
    setting = f"data.path={str(path)!r}"
    if not folder.is_dir():
        is_text = f"data=text data.path={folder}, or " if folder.is_file() else ""
        raise ValueError(f"{setting} is not a folder\n  fix: {is_text}{HOW_TO}")
    try:
        meta = read_json(folder / "meta.json", LARGEST_META)
    except FileNotFoundError as error:
        raise ValueError(f"{setting} has no meta.json, so it is not a token folder\n  fix: {HOW_TO}") from error
    except (OSError, ValueError) as error:
        raise ValueError(f"{setting} has a meta.json that cannot be read ({error})\n  fix: {HOW_TO}") from error
    missing = META_KEYS - set(meta if isinstance(meta, dict) else ())
    if missing:
        raise ValueError(f"{setting} has a meta.json without {', '.join(sorted(missing))}\n  fix: {HOW_TO}")
    if meta["dtype"] not in list(DTYPES):
        raise ValueError(
            f"{setting} has dtype={str(meta['dtype'])[:40]!r} in meta.json, not uint16 or uint32\n  fix: {HOW_TO}"
        )
    for key in ("vocab_size", "train_tokens", "val_tokens", *(DOCUMENT_KEYS if has_documents(meta) else ())):
        if type(meta[key]) is not int or not 0 < meta[key] < 2**62:
            raise ValueError(
                f"{setting} has {key}={short(meta[key])} in meta.json, not a number above 0\n  fix: {HOW_TO}"
            )
    if meta["tokenizer"] not in (None, "tokenizer.json"):
        raise ValueError(
            f"{setting} has tokenizer={short(meta['tokenizer'])} in meta.json, not tokenizer.json\n  fix: {HOW_TO}"
        )
    sizes = {f"{split}.bin": meta[f"{split}_tokens"] * DTYPES[meta["dtype"]].itemsize for split in ("train", "val")}
    if has_documents(meta):
        sizes |= {f"{split}.starts": meta[f"{split}_documents"] * STARTS.itemsize for split in ("train", "val")}
    for name, expected in sizes.items():
        file = folder / name
        actual = file.stat().st_size if file.is_file() else None
        if actual != expected:
            found = "is missing" if actual is None else f"has {actual} bytes"
            raise ValueError(
                f"{setting}: {file.name} {found}, meta.json says {expected} bytes\n  fix: "
                f"copy the folder again or {HOW_TO}"
            )
    return meta


def has_documents(meta: dict) -> bool:
    return all(key in meta for key in DOCUMENT_KEYS)


def check(path: str, packed: bool = False, **rest: object) -> dict[str, int]:
    """Refuse an incomplete folder, before the launch; return the model's required settings. Imports no torch."""
    meta = read_meta(path)
    if packed and not has_documents(meta):
        raise ValueError(
            f"data.packed=true needs the document boundaries, which data.path={str(path)!r} does not have\n"
            f"  fix: data.packed=false, or {HOW_TO}"
        )
    return {"vocab_size": int(meta["vocab_size"])}


class Tokens:
    """A folder that `prepare` wrote, memory-mapped: no token is in memory before it is read.

    Only the order of an epoch grows with the corpus, 4 bytes per sample (dtrain.data.loader). If packed, start-up and
    memory also grow with the number of documents: 2 s and 19 MB for a million of about 300 tokens.
    """

    def __init__(self, path: str, seq_len: int, packed: bool = False) -> None:
        check(path, packed)
        self.meta = read_meta(path)
        self.path = Path(path).expanduser()
        self.seq_len = seq_len
        self.packed = packed
        self.vocab_size: int = self.meta["vocab_size"]
        self._datasets: dict[str, TokenDataset | PackedDataset] = {}

    @cached_property
    def tokenizer(self) -> Tokenizer:
        name = self.meta["tokenizer"]
        return text.load_tokenizer(None if name is None else str(self.path / name))

    def encode(self, text: str) -> list[int]:
        return self.tokenizer.encode(text)

    def decode(self, ids: Iterable[int]) -> str:
        return self.tokenizer.decode(ids)

    def dataset(self, split: str) -> TokenDataset | PackedDataset:
        """The samples of "train" or "val"."""
        token_stream.check_split(split)
        if split not in self._datasets:
            tokens = np.memmap(self.path / f"{split}.bin", dtype=DTYPES[self.meta["dtype"]], mode="r")
            starts = self._starts(split, len(tokens)) if self.packed else np.array([0])
            self._datasets[split] = make_dataset(token_stream.Tokens(tokens, starts), self.seq_len, self.packed, split)
        return self._datasets[split]

    def _starts(self, split: str, num_tokens: int) -> np.ndarray:
        """Return where the documents start. Invalid starts would make samples, and memory for them, of any size."""
        starts = np.fromfile(self.path / f"{split}.starts", dtype=STARTS)
        if starts[0] != 0 or starts[-1] > num_tokens or (starts[1:] < starts[:-1]).any():
            raise ValueError(
                f"data.path={str(self.path)!r}: {split}.starts is not sorted, or does not belong to {split}.bin\n"
                f"  fix: copy the folder again or {HOW_TO}"
            )
        return starts
