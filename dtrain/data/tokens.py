"""Memory-mapped token files: text is tokenized once, and a run of any size reads only what it needs."""

from __future__ import annotations

import json
import os
import shutil
import uuid
from collections.abc import Iterable
from functools import cached_property
from pathlib import Path

import numpy as np

from dtrain.data import corpus, text
from dtrain.data.corpus import Tokenizer
from dtrain.data.text import TokenDataset

DTYPES: dict[str, np.dtype] = {"uint16": np.dtype("<u2"), "uint32": np.dtype("<u4")}
META_KEYS = {"dtype", "vocab_size", "tokenizer", "train_tokens", "val_tokens"}
HOW_TO = "write one with: dtrain data prepare SOURCE OUT"


def prepare(
    source: Path,
    out: Path,
    tokenizer: str | None = None,
    val_fraction: float = 0.05,
    pattern: str = "**/*.txt",
) -> dict:
    """Tokenize `source` into the folder `out` (train.bin, val.bin, meta.json); the same split as Text makes.

    Everything is written beside `out` and renamed at the end, so `out` is complete or not there.
    """
    source, out = Path(source).expanduser(), Path(out).expanduser()
    text.check(str(source), tokenizer=tokenizer, val_fraction=val_fraction, pattern=pattern, setting="source")
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        what = "already holds a token folder" if (out / "meta.json").exists() else "exists and is not empty"
        raise ValueError(f"out={str(out)!r} {what} and is not overwritten\n  fix: remove it or choose another")
    root, names = text.find_documents(source, pattern)
    train, val = ([root / name for name in part] for part in corpus.split_documents(names, val_fraction))
    encoder = text.load_tokenizer(tokenizer)
    dtype = corpus.token_dtype(encoder.vocab_size)

    partial = out.with_name(f".{out.name}.partial-{uuid.uuid4().hex[:8]}")
    partial.mkdir(parents=True)
    try:
        counts = {"train": _write(partial / "train.bin", train, encoder, dtype)}
        if val:
            counts["val"] = _write(partial / "val.bin", val, encoder, dtype)
        else:
            start = corpus.tail_start(counts["train"], val_fraction)
            counts = {"train": start, "val": counts["train"] - start}
            _move_tail(partial / "train.bin", partial / "val.bin", start * dtype.itemsize)
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
        }
        (partial / "meta.json").write_text(json.dumps(meta, indent=2) + "\n")
        os.replace(partial, out)  # also onto an empty folder
    except BaseException:  # Ctrl-C too
        shutil.rmtree(partial, ignore_errors=True)
        raise
    return meta


def _write(file: Path, documents: list[Path], tokenizer: Tokenizer, dtype: np.dtype) -> int:
    """Write the documents' tokens as they come; gives their number."""
    count = 0
    with file.open("wb") as out:
        for tokens in corpus.token_stream(documents, tokenizer):
            out.write(tokens.astype(dtype).tobytes())
            count += len(tokens)
    return count


def _move_tail(file: Path, tail: Path, start: int) -> None:
    """Move the bytes from `start` on into a file of their own."""
    with file.open("r+b") as source, tail.open("wb") as out:
        source.seek(start)
        shutil.copyfileobj(source, out, 1 << 20)
        source.truncate(start)


def read_meta(path: str | Path) -> dict:
    """meta.json of a token folder, checked against the files beside it; imports no torch."""
    folder = Path(path).expanduser()
    setting = f"data.path={str(path)!r}"
    if not folder.is_dir():
        raise ValueError(f"{setting} is not a folder\n  fix: {HOW_TO}")
    try:
        meta = json.loads((folder / "meta.json").read_text())
    except FileNotFoundError as error:
        raise ValueError(f"{setting} has no meta.json, so it is not a token folder\n  fix: {HOW_TO}") from error
    except (OSError, ValueError) as error:
        raise ValueError(f"{setting} has a meta.json that cannot be read ({error})\n  fix: {HOW_TO}") from error
    missing = META_KEYS - set(meta if isinstance(meta, dict) else ())
    if missing:
        raise ValueError(f"{setting} has a meta.json without {', '.join(sorted(missing))}\n  fix: {HOW_TO}")
    if meta["dtype"] not in DTYPES:
        raise ValueError(f"{setting} has dtype={meta['dtype']!r} in meta.json, not uint16 or uint32\n  fix: {HOW_TO}")
    for split in ("train", "val"):
        file = folder / f"{split}.bin"
        expected = meta[f"{split}_tokens"] * DTYPES[meta["dtype"]].itemsize
        actual = file.stat().st_size if file.is_file() else None
        if actual != expected:
            found = "is missing" if actual is None else f"has {actual} bytes"
            raise ValueError(
                f"{setting}: {file.name} {found}, meta.json says {expected} bytes\n  fix: "
                f"copy the folder again or {HOW_TO}"
            )
    return meta


def check(path: str, **rest: object) -> dict[str, int]:
    """Refuse a folder that is not complete, before anything is started; what the model must have. Imports no torch."""
    return {"vocab_size": int(read_meta(path)["vocab_size"])}


class Tokens:
    """A folder that `prepare` wrote, memory-mapped: start-up and memory do not grow with the corpus."""

    def __init__(self, path: str, seq_len: int) -> None:
        self.meta = read_meta(path)
        self.path = Path(path).expanduser()
        self.seq_len = seq_len
        self.vocab_size: int = self.meta["vocab_size"]
        self._datasets: dict[str, TokenDataset] = {}

    @cached_property
    def tokenizer(self) -> Tokenizer:
        name = self.meta["tokenizer"]
        return text.load_tokenizer(None if name is None else str(self.path / name))

    def encode(self, text: str) -> list[int]:
        return self.tokenizer.encode(text)

    def decode(self, ids: Iterable[int]) -> str:
        return self.tokenizer.decode(ids)

    def dataset(self, split: str) -> TokenDataset:
        """The samples of "train" or "val"."""
        corpus.check_split(split)
        if split not in self._datasets:
            tokens = np.memmap(self.path / f"{split}.bin", dtype=DTYPES[self.meta["dtype"]], mode="r")
            self._datasets[split] = TokenDataset(tokens, self.seq_len, name=split)
        return self._datasets[split]
