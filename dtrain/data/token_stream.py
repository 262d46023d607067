"""From documents to tokens: which documents are held out, and their token stream with each document's start."""

from __future__ import annotations

import hashlib
import io
from collections.abc import Hashable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import BinaryIO, NamedTuple, Protocol

import numpy as np

from dtrain.data import files

# With fewer, one document more or less would swing the held-out share, so the tail is held out instead.
MIN_DOCUMENTS_TO_SPLIT = 20
# A longer document is encoded in pieces split after a newline: bounded memory, and pieces run in parallel. Only a merge
# across that newline could differ.
PIECE_BYTES = 1 << 20
BATCH_BYTES = 16 << 20
LONGEST_LINE = 16  # pieces; a longer line is split before a space, or if there is none, between two characters
BATCH_PIECES = 1 << 16  # a short document takes more memory as an object than as text


class Piece(NamedTuple):
    """Up to about PIECE_BYTES of one document."""

    path: Path
    data: bytes
    starts_document: bool


class Tokenizer(Protocol):
    """Text to ids and back."""

    @property
    def vocab_size(self) -> int: ...

    @property
    def separator(self) -> int | None:
        """The id between two documents, if there is one."""

    def encode(self, text: str) -> list[int]: ...

    def decode(self, ids: Iterable[int]) -> str: ...

    def encode_pieces(self, pieces: list[Piece]) -> list[np.ndarray]: ...


def token_dtype(vocab_size: int) -> np.dtype:
    """Return the smallest little-endian dtype for a token file that holds every id."""
    return np.dtype("<u2" if vocab_size <= 1 << 16 else "<u4")


def check_split(split: str) -> None:
    if split not in ("train", "val"):
        raise ValueError(f"split={split!r} must be 'train' or 'val'")


def hash_share(name: str | bytes) -> float:
    """Return a relative path's or text's place in [0, 1): the same on every machine, independent of other names."""
    data = name.encode("utf-8", "surrogateescape") if isinstance(name, str) else name
    return int.from_bytes(hashlib.sha256(data).digest()[:8], "big") / 2**64


def split_documents(names: list[str], val_fraction: float) -> tuple[list[str], list[str]]:
    """Return train and held-out documents; none held out means too few documents: use the tail (`tail_start`)."""
    if len(names) < MIN_DOCUMENTS_TO_SPLIT:
        return names, []
    # With 20 documents and 0.05 the hash alone would hold out none in a third of the cases, so the lowest always goes
    # to val and the highest always to train.
    ranked = sorted(names, key=hash_share)
    held_out = {name for name in ranked[1:-1] if hash_share(name) < val_fraction} | {ranked[0]}
    return [name for name in names if name not in held_out], [name for name in names if name in held_out]


def tail_start(num_tokens: int, val_fraction: float) -> int:
    """Return where the held-out tail of a token stream starts."""
    return num_tokens - int(num_tokens * val_fraction)


def hold_out(shares: Sequence[float], classes: Sequence[Hashable], val_fraction: float) -> list[bool]:
    """Return for each sample with a class whether it is held out: by its share, mostly independent of other samples.

    The highest of each class never is, because every class must be trained; the lowest of all others always is.
    """
    highest: dict[Hashable, float] = {}
    for share, name in zip(shares, classes, strict=True):
        highest[name] = max(share, highest.get(name, share))
    kept = set(highest.values())
    lowest = min((share for share in shares if share not in kept), default=None)
    return [share not in kept and (share == lowest or share < val_fraction) for share in shares]


class TextSplit:
    """Which documents are held out, by a hash of their text: copies of a document are on the same side.

    Built from the first documents. Fewer than 20 are not split, and the tail is held out instead. Of the first 20, the
    one with the lowest hash is held out and the one with the highest is not, so that neither side is empty; if these
    are all equal, more are read until one differs. A single distinct text is not split, either.
    """

    def __init__(self, texts: Iterable[bytes], val_fraction: float) -> None:
        count, first = 0, set()
        for text in texts:
            count += 1
            first.add(hash_share(text))
            if count >= MIN_DOCUMENTS_TO_SPLIT and len(first) > 1:
                break
        self.cuts_tail = count < MIN_DOCUMENTS_TO_SPLIT or len(first) < 2
        self.lowest, self.highest = min(first, default=0.0), max(first, default=1.0)
        self.val_fraction = val_fraction

    def holds_out(self, text: bytes) -> bool:
        share = hash_share(text)
        return not self.cuts_tail and (share == self.lowest or (share < self.val_fraction and share != self.highest))


def read_pieces(path: Path) -> Iterator[Piece]:
    """Yield a file that is one document, whole or split after newlines."""
    with files.reading(path) as file:
        yield from cut(file, path)


def text_pieces(text: bytes, path: Path) -> Iterator[Piece]:
    """Yield the pieces of a document that is already in memory."""
    if 0 < len(text) <= PIECE_BYTES:
        return iter([Piece(path, text, True)])
    return cut(io.BytesIO(text), path)


def cut(file: BinaryIO, path: Path) -> Iterator[Piece]:
    starts = True
    held: list[bytes] = []  # blocks without a newline, so that each byte is searched and joined once
    while block := file.read(PIECE_BYTES):
        held.append(block)
        end = len(block) if len(block) < PIECE_BYTES else block.rfind(b"\n") + 1
        if end or len(held) >= LONGEST_LINE:
            rest = b"".join(held)
            end = end + len(rest) - len(block) if end else _break(rest)
            yield Piece(path, rest[:end], starts)
            starts, held = False, [rest[end:]] if end < len(rest) else []
    if held:
        yield Piece(path, b"".join(held), starts)


def _break(line: bytes) -> int:
    """Return where to split an endless line: before a space, as most tokenizers do anyway, else before a character."""
    end = line.rfind(b" ", len(line) - PIECE_BYTES)
    if end > 0:
        return end
    last = next((i for i in range(1, 5) if line[-i] & 0xC0 != 0x80), 0)  # continuation bytes are 10xxxxxx
    return len(line) - last


class Tokens(NamedTuple):
    """Tokens of documents, and where each document starts, counted from the start of the whole stream."""

    tokens: np.ndarray
    starts: np.ndarray

    def cut(self, position: int) -> tuple[Tokens, Tokens]:
        """Split at a position; a document that spans it starts again there."""
        before = self.starts < position
        after = np.concatenate([[0], self.starts[self.starts > position] - position])
        return Tokens(self.tokens[:position], self.starts[before]), Tokens(self.tokens[position:], after)


def token_stream(pieces: Iterable[Piece], tokenizer: Tokenizer) -> Iterator[Tokens]:
    """Yield the tokens of the documents in order, with a separator between two; empty documents leave no trace.

    A separator belongs to the document before it: a model that sees one document at a time learns where it ends.
    """
    separator = np.array([] if tokenizer.separator is None else [tokenizer.separator], dtype=np.uint32)
    position = 0
    started = False
    for batch in _batches(pieces):
        parts: list[np.ndarray] = []
        starts: list[int] = []
        for piece, tokens in zip(batch, tokenizer.encode_pieces(batch), strict=True):
            if piece.starts_document:
                if started:
                    parts.append(separator.astype(tokens.dtype))
                    position += len(separator)
                starts.append(position)
            started = True
            parts.append(tokens)
            position += len(tokens)
        yield Tokens(np.concatenate(parts), np.array(starts, dtype=np.int64))


def _batches(pieces: Iterable[Piece]) -> Iterator[list[Piece]]:
    """Group pieces to about BATCH_BYTES: enough for a tokenizer's threads, small enough for memory."""
    batch: list[Piece] = []
    num_bytes = 0
    for piece in pieces:
        batch.append(piece)
        num_bytes += len(piece.data)
        if num_bytes >= BATCH_BYTES or len(batch) >= BATCH_PIECES:
            yield batch
            batch, num_bytes = [], 0
    if batch:
        yield batch
