"""Texts, or pairs of texts, with their classes: JSON lines with `text`, `label` and optionally `text_pair`."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from dtrain.data import text, token_stream
from dtrain.data.files import UNREADABLE, json_lines, parse_line
from dtrain.data.token_stream import Piece, Tokenizer
from dtrain.errors import bad

if TYPE_CHECKING:
    from torch import Tensor

TASK = "classify"  # the kind of targets (dtrain/checks/validate.py)

CLS, SEP, PAD = "[CLS]", "[SEP]", "[PAD]"
BYTE_PAD, BYTE_CLS, BYTE_SEP = 0, 257, 258  # 256 is the mask token's (dtrain.data.masked_lm)
FORMAT = '{"text": "…", "label": "…"} a line'


class Record(NamedTuple):
    text: str
    pair: str | None
    label: str | int


# ---- reading -------------------------------------------------------------------------------------------------


def read_records(file: Path) -> Iterator[Record]:
    """Yield the records of a JSON lines file; refuse the first invalid one, with its line number."""
    first: Record | None = None
    try:
        for number, line in json_lines(file):
            if not line.strip():
                continue
            record = _parse(line, f"line {number} of {file.name}", file)
            first = first or record
            if type(record.label) is not type(first.label):
                raise _refused(file, f"line {number} of {file.name}: labels must be all text or all numbers")
            if (record.pair is None) is not (first.pair is None):
                raise _refused(file, f"line {number} of {file.name}: text_pair must be in all lines, or in none")
            yield record
    except UNREADABLE as error:
        raise _refused(file, f"cannot be read ({getattr(error, 'strerror', None) or error})") from error


def _refused(file: Path, rule: str) -> ValueError:
    return bad("data.path", file, rule, FORMAT)


def _parse(line: bytes, where: str, file: Path) -> Record:
    try:
        row = parse_line(line, "utf-8-sig")
    except (ValueError, RecursionError) as error:  # from the encoding or from JSON
        raise _refused(file, f"{where} is not JSON ({error})") from error
    if not isinstance(row, dict):
        raise _refused(file, f"{where} is not an object with text and label")
    found, pair, label = row.get("text"), row.get("text_pair"), row.get("label")
    for name, value in (("text", found), ("text_pair", pair)):
        if name == "text_pair" and value is None:
            continue
        if not isinstance(value, str) or not value:
            raise _refused(file, f"{where}: {name} must be text, and not empty")
        if any("\ud800" <= c <= "\udfff" for c in value):
            raise _refused(file, f"{where}: {name} has a lone surrogate, which is not a character")
        if "\0" in value:
            raise _refused(file, f"{where}: {name} has a NUL character, which is the padding of byte texts")
    if isinstance(label, bool) or not isinstance(label, (str, int)):
        raise _refused(file, f"{where}: label must be text or a whole number")
    return Record(str(found), pair, label)


def read_splits(path: str, val_fraction: float) -> dict[str, list[Record]]:
    """Return train and held-out records: from train.jsonl and val.jsonl in a folder, or from one file, by `split`."""
    root = Path(path).expanduser()
    if root.is_dir():
        files = {name: root / f"{name}.jsonl" for name in ("train", "val")}
        for file in files.values():
            if not file.is_file():
                raise bad(
                    "data.path",
                    path,
                    f"is a folder without {file.name}",
                    "add train.jsonl and val.jsonl, or give a file",
                )
        splits = {name: list(read_records(file)) for name, file in files.items()}
        kinds = [{(type(r.label), r.pair is None) for r in records} for records in splits.values()]
        if all(kinds) and kinds[0] != kinds[1]:
            raise bad("data.path", path, "val.jsonl has a different kind of labels or pairs than train.jsonl", FORMAT)
        splits["val"].sort(key=share_of)
        unknown = {r.label for r in splits["val"]} - {r.label for r in splits["train"]}
        if unknown and splits["train"]:
            rule = f"val.jsonl has the label {min(unknown, key=str)!r}, which train.jsonl does not have"
            raise bad("data.path", path, rule, "remove such lines")
    elif root.is_file():
        splits = split(list(read_records(root)), val_fraction)
    else:
        rule = "is neither a file nor a folder" if root.exists() else "does not exist"
        raise bad("data.path", path, rule, f"give a file with {FORMAT}, or a folder of train.jsonl and val.jsonl")
    for name, records in splits.items():
        if not records:
            raise bad("data.path", path, f"has no {name} samples", "add lines with different texts")
    return splits


def share_of(record: Record) -> float:
    """Return a record's place in [0, 1), by its text."""
    return token_stream.hash_share(f"{record.text}\0{record.pair or ''}")


def split(records: list[Record], val_fraction: float) -> dict[str, list[Record]]:
    """Hold out records by a hash of the text: it does not depend on other records, and no text is in both splits.

    With few texts the hash alone might hold out none, or all of a class (`token_stream.hold_out`). Held-out records are
    in hash order: often only the first ones are used, and files are often sorted by label.
    """
    held_out = token_stream.hold_out([share_of(r) for r in records], [r.label for r in records], val_fraction)
    return {
        "train": [r for r, held in zip(records, held_out, strict=True) if not held],
        "val": sorted((r for r, held in zip(records, held_out, strict=True) if held), key=share_of),
    }


# ---- tokens --------------------------------------------------------------------------------------------------


class Marks(NamedTuple):
    """The ids of special tokens around texts, and the size of the vocabulary."""

    cls: int
    sep: int
    pad: int
    vocab_size: int


def marks_of(tokenizer: str | None, pad_id: int | None) -> Marks:
    """Return the reserved ids of bytes, or a file's special tokens; the padding id must match the model's."""
    if tokenizer is None:
        marks = Marks(BYTE_CLS, BYTE_SEP, BYTE_PAD, BYTE_SEP + 1)
    else:
        loaded = text.FileTokenizer(tokenizer)
        ids: dict[str, Any] = {name: loaded.tokenizer.token_to_id(name) for name in (CLS, SEP, PAD)}
        missing = [name for name, found in ids.items() if found is None]
        if missing:
            fix = "the tokenizer.json of a BERT, or data.tokenizer=null for bytes"
            raise bad("data.tokenizer", tokenizer, f"has no token {' or '.join(missing)}", fix)
        marks = Marks(ids[CLS], ids[SEP], ids[PAD], loaded.vocab_size)
    if pad_id != marks.pad:
        rule = f"texts are padded with token {marks.pad}, which the model must not attend to"
        raise bad("model.pad_id", pad_id, rule, f"model.pad_id={marks.pad}")
    return marks


def check_length(seq_len: int, pairs: bool) -> None:
    least = 5 if pairs else 3  # one token of each text, and the marks around them
    if seq_len < least:
        rule = f"must be at least {least}, to have room for {CLS}, {SEP} and a token of each text"
        raise bad("model.seq_len", seq_len, rule, f"model.seq_len={least}")


def cut(first: int, second: int, room: int) -> tuple[int, int]:
    """Return how many tokens of each of two texts are kept: the longer one is truncated until both fit."""
    half = room // 2
    if first + second <= room:
        return first, second
    if second <= half:
        return room - second, second
    if first <= room - half:
        return first, room - first
    return room - half, half


class LabelledDataset:
    """[CLS] text [SEP], or [CLS] text [SEP] text_pair [SEP] with segments 0 and 1; padded to one length."""

    def __init__(
        self, records: Sequence[Record], labels: Sequence[str | int], tokenizer: Tokenizer, marks: Marks, seq_len: int
    ) -> None:
        self.seq_len, self.marks = seq_len, marks
        self.pairs = records[0].pair is not None
        check_length(seq_len, self.pairs)
        ids = {label: i for i, label in enumerate(labels)}
        self.targets = np.array([ids[r.label] for r in records], dtype=np.int64)
        firsts = _encode([r.text for r in records], tokenizer)
        seconds = _encode([r.pair or "" for r in records], tokenizer) if self.pairs else [firsts[0][:0]] * len(records)
        dtype = token_stream.token_dtype(marks.vocab_size)
        cls, sep = np.array([marks.cls], dtype), np.array([marks.sep], dtype)
        parts, bounds = [], []
        for a, b in zip(firsts, seconds, strict=True):
            kept, kept_pair = cut(len(a), len(b), seq_len - (3 if self.pairs else 2))
            sample = [cls, a[:kept], sep, *([b[:kept_pair], sep] if self.pairs else [])]
            parts += sample
            bounds.append((kept + 2, sum(map(len, sample))))
        # one array for all samples, because lengths differ; reading past a sample's end would reach the next
        self.tokens = np.concatenate([*parts, np.zeros(seq_len, dtype)]).astype(dtype)
        self.first_length, self.length = np.array(bounds).T
        self.start = np.cumsum(self.length) - self.length

    @property
    def fingerprint(self) -> str:
        digest = hashlib.sha256(self.tokens.astype("<u4").tobytes())
        digest.update(self.targets.astype("<i8").tobytes())
        return digest.hexdigest()[:16]

    def __len__(self) -> int:
        return len(self.targets)

    def batch(self, indices: np.ndarray) -> tuple[Tensor, Tensor]:
        import torch

        place = np.arange(self.seq_len)
        there = place < self.length[indices, None]
        inputs = np.where(there, self.tokens[self.start[indices, None] + place].astype(np.int64), self.marks.pad)
        if self.pairs:
            segments = there & (place >= self.first_length[indices, None])
            inputs = np.stack([inputs, segments.astype(np.int64)], axis=-1)
        return torch.from_numpy(inputs), torch.from_numpy(self.targets[indices])


def _encode(texts: list[str], tokenizer: Tokenizer) -> list[np.ndarray]:
    return tokenizer.encode_pieces([Piece(Path(), t.encode(), True) for t in texts])


# ---- the data ------------------------------------------------------------------------------------------------


def check(
    path: str,
    seq_len: int,
    pad_id: int | None,
    tokenizer: str | None = None,
    val_fraction: float = 0.1,
) -> dict[str, int]:
    """Refuse settings and files that cannot work; return the model's required settings. Reads all lines; no torch."""
    marks, splits = read_checked(path, seq_len, pad_id, tokenizer, val_fraction)
    return {"vocab_size": marks.vocab_size, "num_classes": len(labels_of(splits))}


def read_checked(
    path: str, seq_len: int, pad_id: int | None, tokenizer: str | None, val_fraction: float
) -> tuple[Marks, dict[str, list[Record]]]:
    """Check settings and every line of the files; return the special tokens and the records."""
    if not 0 < val_fraction < 1:
        raise bad("data.val_fraction", val_fraction, "must be between 0 and 1, ends excluded", "data.val_fraction=0.1")
    marks = marks_of(tokenizer, pad_id)
    splits = read_splits(path, val_fraction)
    check_length(seq_len, splits["train"][0].pair is not None)
    labels = labels_of(splits)
    if len(labels) < 2:
        raise bad("data.path", path, f"all texts have the label {labels[0]!r}", "give texts of at least two classes")
    return marks, splits


def labels_of(splits: dict[str, list[Record]]) -> list[str | int]:
    """Return the classes in order: sorted by name, or by number."""
    return sorted({r.label for records in splits.values() for r in records})


class Labelled:
    """A file of JSON lines, some of it held out, or a folder of train.jsonl and val.jsonl; held in memory."""

    def __init__(
        self,
        path: str,
        seq_len: int,
        pad_id: int | None,
        tokenizer: str | None = None,
        val_fraction: float = 0.1,
    ) -> None:
        marks, self._splits = read_checked(path, seq_len, pad_id, tokenizer, val_fraction)
        self._prepare(seq_len, text.load_tokenizer(tokenizer), marks)

    def _prepare(self, seq_len: int, tokenizer: Tokenizer, marks: Marks) -> None:
        self.seq_len, self.tokenizer, self.marks = seq_len, tokenizer, marks
        self.vocab_size = marks.vocab_size
        self._datasets: dict[str, LabelledDataset] = {}

    @cached_property
    def labels(self) -> list[str | int]:
        """The name of each class."""
        return labels_of(self._splits)

    def dataset(self, split: str) -> LabelledDataset:
        """The samples of "train" or "val"."""
        token_stream.check_split(split)
        if split not in self._datasets:
            made = LabelledDataset(self._splits[split], self.labels, self.tokenizer, self.marks, self.seq_len)
            self._datasets[split] = made
        return self._datasets[split]
