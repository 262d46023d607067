"""Documents on disk: which are held out, and their tokens as a stream. Shared by text, stdlib and tokens."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple, Protocol

import numpy as np

# Below this, one document more or less would swing the held-out share, so the tail is cut off instead.
MIN_DOCUMENTS_TO_SPLIT = 20
# A longer document is encoded in pieces cut after a newline: bounded memory, and pieces run in parallel.
# Only a merge across that newline could come out differently.
PIECE_BYTES = 1 << 20
BATCH_BYTES = 16 << 20


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
        """The id put between two documents, if there is one."""

    def encode(self, text: str) -> list[int]: ...

    def decode(self, ids: Iterable[int]) -> str: ...

    def encode_pieces(self, pieces: list[Piece]) -> list[np.ndarray]: ...


def token_dtype(vocab_size: int) -> np.dtype:
    """The smallest little-endian type of a token file that holds every id."""
    return np.dtype("<u2" if vocab_size <= 1 << 16 else "<u4")


def check_split(split: str) -> None:
    if split not in ("train", "val"):
        raise ValueError(f"split={split!r} must be 'train' or 'val'")


def list_files(root: Path, pattern: str) -> Iterator[Path]:
    """Files under root that match; a dangling link is given too, so that reading it fails loudly."""
    try:
        yield from (path for path in root.glob(pattern) if not path.is_dir())
    except (ValueError, NotImplementedError) as error:  # empty or absolute pattern
        raise ValueError(
            f"data.pattern={pattern!r} must be a relative glob ({error})\n  fix: data.pattern='**/*.txt'"
        ) from error


def hash_share(name: str) -> float:
    """A relative path's place in [0, 1): the same on every machine, and whatever else is in the folder."""
    digest = hashlib.sha256(name.encode("utf-8", "surrogateescape")).digest()
    return int.from_bytes(digest[:8], "big") / 2**64


def split_documents(names: list[str], val_fraction: float) -> tuple[list[str], list[str]]:
    """Train and held-out documents; none held out means too few documents: cut the tail (`tail_start`)."""
    if len(names) < MIN_DOCUMENTS_TO_SPLIT:
        return names, []
    # With 20 documents and 0.05 the hash alone would hold out none in a third of the cases, so the lowest
    # always goes to val and the highest always to train.
    ranked = sorted(names, key=hash_share)
    held_out = {name for name in ranked[1:-1] if hash_share(name) < val_fraction} | {ranked[0]}
    return [name for name in names if name not in held_out], [name for name in names if name in held_out]


def tail_start(num_tokens: int, val_fraction: float) -> int:
    """Where the held-out tail of a token stream starts."""
    return num_tokens - int(num_tokens * val_fraction)


def read_pieces(path: Path) -> Iterator[Piece]:
    """One document, whole or cut after newlines."""
    starts, rest = True, b""
    try:
        with path.open("rb") as file:
            while block := file.read(PIECE_BYTES):
                rest += block
                cut = len(rest) if len(block) < PIECE_BYTES else rest.rfind(b"\n") + 1
                if cut:
                    yield Piece(path, rest[:cut], starts)
                    starts, rest = False, rest[cut:]
    except OSError as error:
        raise ValueError(
            f"document {str(path)!r} cannot be read ({error.strerror})\n  fix: its permissions or remove it"
        ) from error
    if rest:
        yield Piece(path, rest, starts)


def token_stream(paths: list[Path], tokenizer: Tokenizer) -> Iterator[np.ndarray]:
    """The tokens of the documents in order, with a separator between two; empty documents leave no trace."""
    separator = np.array([] if tokenizer.separator is None else [tokenizer.separator], dtype=np.uint32)
    started = False
    for batch in _batches(paths):
        for piece, tokens in zip(batch, tokenizer.encode_pieces(batch), strict=True):
            if started and piece.starts_document:
                yield separator.astype(tokens.dtype)
            started = True
            yield tokens


def _batches(paths: list[Path]) -> Iterator[list[Piece]]:
    """Pieces in groups of about BATCH_BYTES: enough for a tokenizer's threads, small enough for memory."""
    batch: list[Piece] = []
    num_bytes = 0
    for path in paths:
        for piece in read_pieces(path):
            batch.append(piece)
            num_bytes += len(piece.data)
            if num_bytes >= BATCH_BYTES:
                yield batch
                batch, num_bytes = [], 0
    if batch:
        yield batch
