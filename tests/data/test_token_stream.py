"""The split and the stream that text, stdlib and tokens share."""

from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dtrain.data import documents, token_stream
from dtrain.data.text import ByteTokenizer

NAMES = st.lists(st.text("abc/.é", min_size=1), min_size=20, max_size=60, unique=True)
FRACTIONS = st.floats(0.001, 0.999)


@given(NAMES, FRACTIONS)
def test_split_has_every_document_once_and_two_sides(names: list[str], fraction: float) -> None:
    train, val = token_stream.split_documents(names, fraction)
    assert train and val
    assert not set(train) & set(val)
    assert sorted(train + val) == sorted(names)


@given(NAMES, FRACTIONS, st.integers(0, 19))
def test_a_new_document_moves_no_other_but_the_extremes(names: list[str], fraction: float, n: int) -> None:
    """Held out stays held out when the folder grows, except for the one kept back so no side is empty."""
    before = set(token_stream.split_documents(names, fraction)[1])
    after = set(token_stream.split_documents([*names, f"new/{n}"], fraction)[1]) - {f"new/{n}"}
    ranked = sorted(names, key=token_stream.hash_share)
    assert before ^ after <= {ranked[0], ranked[-1]}


def test_split_share_follows_the_fraction() -> None:
    _, val = token_stream.split_documents([f"doc-{n}.txt" for n in range(5000)], 0.1)
    assert 400 < len(val) < 600


def test_split_is_pinned() -> None:
    """sha256 of the path and not Python's hash, which differs from one process to the next."""
    assert token_stream.hash_share("a.txt") == pytest.approx(0.0965545, abs=1e-6)


def test_few_documents_are_not_split_by_document() -> None:
    names = [str(n) for n in range(19)]
    assert token_stream.split_documents(names, 0.5) == (names, [])


@settings(deadline=None)
@given(st.lists(st.text("a é…\n", max_size=40).map(str.encode)), st.integers(1, 9))
def test_stream_is_the_joined_documents_however_it_is_cut(
    tmp_path_factory: pytest.TempPathFactory, texts: list[bytes], piece_bytes: int
) -> None:
    folder = tmp_path_factory.mktemp("stream")
    paths = [folder / str(n) for n in range(len(texts))]
    for path, data in zip(paths, texts, strict=True):
        path.write_bytes(data)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(token_stream, "PIECE_BYTES", piece_bytes)
        patch.setattr(token_stream, "BATCH_BYTES", 3 * piece_bytes)
        pieces = [piece for path in paths for piece in token_stream.read_pieces(path)]
        in_memory = [piece for data in texts for piece in token_stream.text_pieces(data, folder)]
        parts = list(token_stream.token_stream(pieces, ByteTokenizer()))
    if piece_bytes not in map(len, texts):  # a file of just that size is cut, as nobody knows yet that it ends there
        assert [piece[1:] for piece in in_memory] == [piece[1:] for piece in pieces]
    assert all(piece.data.decode() for piece in pieces if piece_bytes > 3), "no character is cut"
    # and what was left of the line before it: up to a piece, or a character
    assert all(len(piece.data) <= token_stream.LONGEST_LINE * piece_bytes + 3 for piece in pieces)
    stream = b"".join(part.tokens.tobytes() for part in parts)
    filled = [data for data in texts if data]
    assert stream == b"\0".join(filled)
    starts = [start for part in parts for start in part.starts.tolist()]
    assert [stream[low:high] for low, high in pairwise([*starts, None])] == [
        data + (b"\0" if n < len(filled) - 1 else b"") for n, data in enumerate(filled)
    ]


def test_a_long_document_is_cut_after_newlines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(token_stream, "PIECE_BYTES", 8)
    (tmp_path / "a").write_bytes(b"one\ntwo\nthree\nfour-is-long\nend")
    pieces = list(token_stream.read_pieces(tmp_path / "a"))
    assert len(pieces) > 2
    assert [piece.starts_document for piece in pieces] == [True] + [False] * (len(pieces) - 1)
    assert all(piece.data.endswith(b"\n") for piece in pieces[:-1])


def test_a_file_without_newlines_is_searched_once_and_cut_before_a_space(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(token_stream, "PIECE_BYTES", 16)
    (tmp_path / "a").write_bytes(b"seven letters " * 200)
    pieces = list(token_stream.read_pieces(tmp_path / "a"))
    assert len(pieces) > 5 and b"".join(p.data for p in pieces) == b"seven letters " * 200
    assert all(piece.data.startswith(b" ") for piece in pieces[1:])
    monkeypatch.undo()
    (tmp_path / "b").write_bytes("é".encode() * (12 << 20))  # 24 MiB; searched again for each MiB, it took a second
    sizes = [len(piece.data) for piece in token_stream.read_pieces(tmp_path / "b")]
    assert max(sizes) <= 16 << 20 and sum(sizes) == 24 << 20 and all(size % 2 == 0 for size in sizes)


def test_equal_texts_are_not_all_held_out() -> None:
    split = token_stream.TextSplit([b"same"] * 40, 0.05)
    assert split.cuts_tail and not split.holds_out(b"same"), "the tail is held out instead"
    split = token_stream.TextSplit([b"same"] * 40 + [b"other"], 0.05)
    assert not split.cuts_tail and split.holds_out(b"same") != split.holds_out(b"other")


@settings(deadline=None)
@given(st.lists(st.tuples(st.integers(0, 30), st.integers(0, 3)), min_size=1), FRACTIONS)
def test_no_class_is_held_out_wholly(samples: list[tuple[int, int]], fraction: float) -> None:
    shares = [token_stream.hash_share(str(n)) for n, _ in samples]
    classes = [c for _, c in samples]
    held_out = token_stream.hold_out(shares, classes, fraction)
    assert {c for c, held in zip(classes, held_out, strict=True) if not held} == set(classes)
    assert any(held_out) or len(set(shares)) <= len(set(classes))
    assert len({(s, h) for s, h in zip(shares, held_out, strict=True)}) == len(set(shares)), "a copy is on one side"


def test_a_document_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    (tmp_path / "gone.txt").symlink_to(tmp_path / "nowhere")
    source = documents.open_source(tmp_path, "*.txt", "text", 0.05)
    with pytest.raises(ValueError, match=r"gone.txt.* cannot be read"):
        list(source.pieces("train"))


@given(st.lists(st.binary(max_size=3), max_size=60), FRACTIONS)
def test_a_split_by_text_has_copies_on_one_side_and_no_side_empty(texts: list[bytes], fraction: float) -> None:
    split = token_stream.TextSplit(texts, fraction)
    assert split.cuts_tail == (len(texts) < 20 or len(set(texts)) < 2)
    held_out = {text for text in texts if split.holds_out(text)}
    if split.cuts_tail:
        assert not held_out
    else:
        assert held_out and held_out != set(texts)
    more = token_stream.TextSplit([*texts, b"new"], fraction)
    assert split.cuts_tail or {text for text in texts if more.holds_out(text)} == held_out, "what is added moves none"


def test_a_split_by_text_follows_the_fraction() -> None:
    texts = [b"%d" % n for n in range(5000)]
    split = token_stream.TextSplit(texts, 0.1)
    assert 400 < sum(map(split.holds_out, texts)) < 600


@given(st.lists(st.integers(0, 5), min_size=1, max_size=8), st.data())
def test_a_cut_stream_has_the_same_documents_but_the_one_it_goes_through(
    lengths: list[int], data: st.DataObject
) -> None:
    ends = np.cumsum(lengths)
    whole = token_stream.Tokens(np.arange(ends[-1]), ends - lengths)
    position = data.draw(st.integers(0, int(ends[-1])))
    before, after = whole.cut(position)
    assert np.concatenate([before.tokens, after.tokens]).tolist() == whole.tokens.tolist()
    places = {*before.starts.tolist(), *(after.starts + position).tolist()}
    assert places == {*whole.starts.tolist(), position}
