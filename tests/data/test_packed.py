"""Packing: every token of every document once and in order, each document alone, and little padding."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dtrain.data import packed
from dtrain.data.packed import IGNORED, PackedDataset, best_fit
from dtrain.data.stdlib import Stdlib
from dtrain.data.token_stream import Tokens
from dtrain.models import layers

LENGTHS = st.lists(st.integers(0, 40), min_size=1, max_size=40)
ROOM = st.integers(1, 16)


def corpus_of(lengths: list[int]) -> Tokens:
    """Each token is its own place in the stream, so that what a sample shows says where it is from."""
    ends = np.cumsum(lengths)
    return Tokens(np.arange(ends[-1] if lengths else 0), ends - lengths)


def pieces_of(inputs: torch.Tensor, targets: torch.Tensor) -> list[tuple[list[int], list[int]]]:
    """What a model makes of one sample: a new document at every position 0; tokens and targets of each."""
    tokens, positions = inputs.unbind(-1)
    starts = (positions == 0).nonzero().flatten().tolist()
    found = []
    for low, high in zip(starts, [*starts[1:], len(tokens)], strict=True):
        assert positions[low:high].tolist() == list(range(high - low)), "positions count up from 0"
        found.append((tokens[low:high].tolist(), targets[low:high].tolist()))
    return found


@given(LENGTHS, ROOM, st.integers(1, 7))
def test_every_token_once_in_its_order_with_the_next_as_its_target(lengths: list[int], room: int, group: int) -> None:
    documents = corpus_of(lengths)
    targeted = sum(max(0, n - 1) for n in lengths)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(packed, "GROUP", group)
        if not targeted:
            with pytest.raises(ValueError, match=r"data.packed=true needs a document of at least 2 tokens"):
                PackedDataset(documents, room)
            return
        dataset = PackedDataset(documents, room)
    inputs, targets = dataset.batch(np.arange(len(dataset)))
    assert inputs.shape == (len(dataset), room, 2) and targets.shape == (len(dataset), room)
    assert inputs.dtype == targets.dtype == torch.int64
    assert (targets != IGNORED).any(dim=1).all(), "every sample has something to learn from"

    start_of, end_of = {}, {}
    for start, length in zip(documents.starts.tolist(), lengths, strict=True):
        for token in range(start, start + length):
            start_of[token], end_of[token] = start, start + length
    seen: list[int] = []
    for sample, sample_targets in zip(inputs, targets, strict=True):
        pieces = pieces_of(sample, sample_targets)
        if all(target == IGNORED for target in pieces[-1][1]):  # every piece has a target: this is padding
            assert not any(pieces.pop()[0])
        for tokens, following in pieces:
            first, last = tokens[0], tokens[-1]
            assert tokens == list(range(first, last + 1)) and start_of[first] == start_of[last], "of one document"
            assert (first - start_of[first]) % room == 0, "and from a whole number of pieces on"
            ends = last + 1 == end_of[last]
            assert following == [*tokens[1:], IGNORED if ends else last + 1]
            seen += tokens
    alone = {end - 1 for end in end_of.values() if (end - 1 - start_of[end - 1]) % room == 0}
    assert sorted(seen) == [token for token in range(len(documents.tokens)) if token not in alone]
    assert sum((targets != IGNORED).sum(dim=1).tolist()) == targeted, "all but a document's first token are targets"
    assert dataset.padding == pytest.approx(1 - len(seen) / (len(dataset) * room))


@settings(max_examples=50)
@given(st.lists(st.integers(1, 30), max_size=200), st.integers(30, 40))
def test_it_is_best_fit_decreasing(lengths: list[int], room: int) -> None:
    """Against the definition, a piece at a time: the same number of sequences, with the same room left over."""
    left: list[int] = []
    for length in sorted(lengths, reverse=True):
        fits = [n for n, free in enumerate(left) if free >= length]
        if fits:
            left[min(fits, key=lambda n: left[n])] -= length
        else:
            left.append(room - length)
    where = best_fit(np.array(lengths, dtype=np.int64), room)
    used = np.bincount(where, weights=lengths) if lengths else np.array([])
    assert sorted(room - used) == sorted(left)


def test_a_batch_follows_the_order_of_the_indices() -> None:
    dataset = PackedDataset(corpus_of([5, 9, 3, 7, 2]), 8)
    everything = dataset.batch(np.arange(len(dataset)))
    some = dataset.batch(np.array([2, 0, 2]))
    for whole, part in zip(everything, some, strict=True):
        assert torch.equal(part, whole[[2, 0, 2]]) and part.is_contiguous()
    with pytest.raises(IndexError):
        dataset.batch(np.array([len(dataset)]))


def test_a_document_far_into_a_corpus_has_only_its_own_pieces() -> None:
    """Memory for pieces of all that is before each document would not be there: a corpus has billions of tokens."""
    far = 10**15
    start, length, last = packed.cut_pieces(np.array([far]), np.array([far + 20]), 8)
    assert (start - far).tolist() == [0, 8, 16] and length.tolist() == [8, 8, 4]
    assert last.tolist() == [False, False, True]


def test_the_layout_is_pinned() -> None:
    """Runs in the field resume by packing again: a change here gives them other samples, and their data is refused."""
    dataset = PackedDataset(corpus_of([5, 9, 3, 7, 2, 20, 1, 4]), 8)
    assert dataset.fingerprint == "d1176c7c0442cbbc"
    tokens, positions = dataset.batch(np.array([4]))[0][0].unbind(-1)
    assert tokens.tolist() == [0, 1, 2, 3, 4, 14, 15, 16] and positions.tolist() == [0, 1, 2, 3, 4, 0, 1, 2]


def test_the_fingerprint_knows_text_and_layout() -> None:
    documents = corpus_of([5, 9, 3])
    base = PackedDataset(documents, 8).fingerprint
    assert PackedDataset(documents, 8).fingerprint == base
    others = [
        PackedDataset(documents, 9), PackedDataset(corpus_of([5, 8, 4]), 8),
        PackedDataset(Tokens(documents.tokens + 1, documents.starts), 8),
    ]  # fmt: skip
    assert base not in [other.fingerprint for other in others]


def test_the_library_has_hardly_any_padding() -> None:
    """543 files with sequences of 512 bytes: 0.03% (0.12% of the 27 held out); one document a sequence: 1.4%."""
    data = Stdlib(seq_len=512, packed=True)
    train, val = data.dataset("train"), data.dataset("val")
    assert isinstance(train, PackedDataset) and isinstance(val, PackedDataset)
    assert train.padding < 0.002 and val.padding < 0.01


def test_ignored_is_the_models_own() -> None:
    assert IGNORED == layers.IGNORED
