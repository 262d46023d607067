"""Samples of whole documents, packed into sequences with little padding; a model sees each document alone."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING

import numpy as np

from dtrain.data.token_stream import Tokens
from dtrain.data.windows import IGNORED, TokenDataset, fingerprint

if TYPE_CHECKING:
    from torch import Tensor

# Documents packed together: enough that almost no padding remains, few enough for memory. It affects results, because
# another value gives other samples.
GROUP = 1 << 18


def best_fit(lengths: np.ndarray, room: int) -> np.ndarray:
    """Best-fit packing of pieces into sequences of `room` tokens, longest first; return each piece's sequence.

    Pieces of one length are placed together, so the time grows with the number of lengths, not of pieces.
    """
    sizes, counts = np.unique(lengths, return_counts=True)
    order = np.argsort(-lengths, kind="stable")
    where = np.empty(len(lengths), dtype=np.int64)
    free: dict[int, np.ndarray] = {}  # tokens left → the sequences that have this many left
    nonempty = 0  # the keys of `free`, as bits
    num_sequences = 0

    def put(left: int, sequences: np.ndarray) -> None:
        nonlocal nonempty
        if left and len(sequences):
            free[left] = np.concatenate([free[left], sequences]) if left in free else sequences
            nonempty |= 1 << left

    for length, count in zip(sizes[::-1].tolist(), counts[::-1].tolist(), strict=True):
        pieces, order = order[:count], order[count:]
        while len(pieces):
            fitting = nonempty >> length
            if fitting:
                left = length + (fitting & -fitting).bit_length() - 1
                sequences = free.pop(left)
                nonempty ^= 1 << left
            else:
                left = room
                sequences = np.arange(num_sequences, num_sequences - (-len(pieces) // (room // length)))
                num_sequences += len(sequences)
            # A sequence that took a piece and has room for another is again the best fit, so it is filled up.
            each = left // length
            taken = min(len(pieces), len(sequences) * each)
            full, rest = divmod(taken, each)
            used = full + (rest > 0)
            where[pieces[:taken]] = np.repeat(sequences[:used], each)[:taken]
            pieces = pieces[taken:]
            put(left - each * length, sequences[:full])
            put(left - rest * length, sequences[full:used])
            put(left, sequences[used:])
    return where


def cut_pieces(starts: np.ndarray, ends: np.ndarray, seq_len: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Split documents into pieces of at most `seq_len` tokens: start, length, and whether it ends its document.

    A piece must have something to predict: a document's last token alone has not, and is dropped.
    """
    counts = -(-(ends - starts) // seq_len)
    before = np.cumsum(counts) - counts
    number = np.arange(counts.sum()) - np.repeat(before, counts)  # of the piece within its document
    start = np.repeat(starts, counts) + number * seq_len
    length = np.minimum(np.repeat(ends, counts) - start, seq_len)
    last = start + length == np.repeat(ends, counts)
    kept = (length > 1) | ~last
    return start[kept], length[kept], last[kept]


class PackedDataset:
    """Sequences of whole documents. A sample is (token, position within its document) for each place.

    A document that is longer than a sequence is split; each piece counts positions from 0, because a model sees no
    further back. Targets are the next token of the same document; its last token and the padding have none. Padding has
    positions from 0, too, so that it is its own document.
    """

    masked = True  # the number of targets differs between samples

    def __init__(self, documents: Tokens, seq_len: int, name: str = "data") -> None:
        if seq_len < 1:
            raise ValueError(f"model.seq_len={seq_len} must be at least 1")
        self.tokens, starts = documents
        self.seq_len = seq_len
        ends = np.append(starts[1:], len(self.tokens))
        groups = [slice(low, low + GROUP) for low in range(0, len(starts), GROUP)]
        pieces = [self._pack(starts[group].astype(np.int64), ends[group].astype(np.int64)) for group in groups]
        if not sum(len(counts) for *_, counts in pieces):
            fix = "raise data.val_fraction" if name == "val" else "add text"
            raise ValueError(
                f"data.packed=true needs a document of at least 2 tokens, and the {name} split has none\n  fix: {fix}"
            )
        # The pieces in the order of their sequences, and where each sequence's pieces begin.
        self.start, self.length, self.last, counts = (np.concatenate(part) for part in zip(*pieces, strict=True))
        self.first = np.concatenate([[0], np.cumsum(counts)])

    def _pack(self, starts: np.ndarray, ends: np.ndarray) -> tuple[np.ndarray, ...]:
        start, length, last = cut_pieces(starts, ends, self.seq_len)
        sequence = best_fit(length, self.seq_len)
        order = np.argsort(sequence, kind="stable")
        return start[order], length[order].astype(np.int32), last[order], np.bincount(sequence)

    @property
    def fingerprint(self) -> str:
        """Identifies the text and how it is packed."""
        digest = hashlib.sha256(fingerprint(self.tokens).encode())
        for part in (self.start.astype("<i8"), self.length.astype("<i4"), self.first.astype("<i8")):
            digest.update(part.data)
        return digest.hexdigest()[:16]

    @property
    def padding(self) -> float:
        """The share of all places that is padding."""
        return 1 - int(self.length.sum(dtype=np.int64)) / (len(self) * self.seq_len)

    def __len__(self) -> int:
        return len(self.first) - 1

    def batch(self, indices: np.ndarray) -> tuple[Tensor, Tensor]:
        import torch

        indices = np.asarray(indices)
        counts = self.first[indices + 1] - self.first[indices]
        pieces = _runs(self.first[indices], counts)
        start, length = self.start[pieces], self.length[pieces].astype(np.int64)
        # each piece's place in the flattened batch: after the previous pieces of its own sample
        before = np.cumsum(length) - length
        sample = np.repeat(np.arange(len(indices)), counts)
        first = np.cumsum(counts) - counts
        place = sample * self.seq_len + before - before[first[sample]]
        inputs = np.zeros((len(indices) * self.seq_len, 2), dtype=np.int64)
        targets = np.full(len(inputs), IGNORED, dtype=np.int64)
        where, source = _runs(place, length), _runs(start, length)
        inputs[where, 0] = self.tokens[source]
        inputs[where, 1] = source - np.repeat(start, length)
        # if the document continues after a piece, the next token is a target, too
        following = source + 1
        ends = np.cumsum(length) - 1
        following[ends[self.last[pieces]]] = 0
        targets[where] = self.tokens[following]
        targets[where[ends[self.last[pieces]]]] = IGNORED
        # padding: after the last piece of each sample
        filled = np.add.reduceat(length, first)
        rest = _runs(np.arange(len(indices)) * self.seq_len + filled, self.seq_len - filled)
        inputs[rest, 1] = rest % self.seq_len - np.repeat(filled, self.seq_len - filled)
        shape = (len(indices), self.seq_len)
        return torch.from_numpy(inputs.reshape(*shape, 2)), torch.from_numpy(targets.reshape(shape))


def _runs(starts: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """Concatenate start, start + 1, ... of each run."""
    before = np.cumsum(lengths) - lengths
    return np.arange(lengths.sum()) + np.repeat(starts - before, lengths)


def make_dataset(documents: Tokens, seq_len: int, packed: bool, name: str) -> TokenDataset | PackedDataset:
    """Return a split's samples: packed documents, or windows of their token stream."""
    return PackedDataset(documents, seq_len, name) if packed else TokenDataset(documents.tokens, seq_len, name)
