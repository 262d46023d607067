"""The split and the stream that text, stdlib and tokens share."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dtrain.data import corpus
from dtrain.data.text import ByteTokenizer

NAMES = st.lists(st.text("abc/.é", min_size=1), min_size=20, max_size=60, unique=True)
FRACTIONS = st.floats(0.001, 0.999)


@given(NAMES, FRACTIONS)
def test_split_has_every_document_once_and_two_sides(names: list[str], fraction: float) -> None:
    train, val = corpus.split_documents(names, fraction)
    assert train and val
    assert not set(train) & set(val)
    assert sorted(train + val) == sorted(names)


@given(NAMES, FRACTIONS, st.integers(0, 19))
def test_a_new_document_moves_no_other_but_the_extremes(names: list[str], fraction: float, n: int) -> None:
    """Held out stays held out when the folder grows, except for the one kept back so no side is empty."""
    before = set(corpus.split_documents(names, fraction)[1])
    after = set(corpus.split_documents([*names, f"new/{n}"], fraction)[1]) - {f"new/{n}"}
    ranked = sorted(names, key=corpus.hash_share)
    assert before ^ after <= {ranked[0], ranked[-1]}


def test_split_share_follows_the_fraction() -> None:
    _, val = corpus.split_documents([f"doc-{n}.txt" for n in range(5000)], 0.1)
    assert 400 < len(val) < 600


def test_split_is_pinned() -> None:
    """sha256 of the path and not Python's hash, which differs from one process to the next."""
    assert corpus.hash_share("a.txt") == pytest.approx(0.0965545, abs=1e-6)


def test_few_documents_are_not_split_by_document() -> None:
    names = [str(n) for n in range(19)]
    assert corpus.split_documents(names, 0.5) == (names, [])


@given(st.lists(st.binary(max_size=40).map(lambda data: data.replace(b"x", b"\n"))), st.integers(1, 9))
def test_stream_is_the_joined_documents_however_it_is_cut(
    tmp_path_factory: pytest.TempPathFactory, documents: list[bytes], piece_bytes: int
) -> None:
    folder = tmp_path_factory.mktemp("stream")
    paths = [folder / str(n) for n in range(len(documents))]
    for path, data in zip(paths, documents, strict=True):
        path.write_bytes(data)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(corpus, "PIECE_BYTES", piece_bytes)
        patch.setattr(corpus, "BATCH_BYTES", 3 * piece_bytes)
        stream = b"".join(tokens.tobytes() for tokens in corpus.token_stream(paths, ByteTokenizer()))
    assert stream == b"\0".join(data for data in documents if data)


def test_a_long_document_is_cut_after_newlines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(corpus, "PIECE_BYTES", 8)
    (tmp_path / "a").write_bytes(b"one\ntwo\nthree\nfour-is-long\nend")
    pieces = list(corpus.read_pieces(tmp_path / "a"))
    assert len(pieces) > 2
    assert [piece.starts_document for piece in pieces] == [True] + [False] * (len(pieces) - 1)
    assert all(piece.data.endswith(b"\n") for piece in pieces[:-1])


def test_a_document_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    (tmp_path / "gone.txt").symlink_to(tmp_path / "nowhere")
    paths = list(corpus.list_files(tmp_path, "*.txt"))
    with pytest.raises(ValueError, match=r"gone.txt.* cannot be read"):
        list(corpus.token_stream(paths, ByteTokenizer()))
