"""Text files, the tokenizers and the windows cut from a token stream."""

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dtrain.data import text
from dtrain.data.text import ByteTokenizer, Text, TokenDataset, load_tokenizer
from dtrain.util.regular_file import open_regular


@given(st.integers(2, 200), st.integers(1, 20))
def test_windows_cover_the_stream_and_targets_are_one_ahead(num_tokens: int, seq_len: int) -> None:
    if num_tokens <= seq_len:
        with pytest.raises(ValueError, match=f"model.seq_len={seq_len} needs at least {seq_len + 1} tokens"):
            TokenDataset(np.arange(num_tokens), seq_len)
        return
    tokens = np.arange(num_tokens, dtype=np.uint8)
    dataset = TokenDataset(tokens, seq_len)
    assert len(dataset) == (num_tokens - 1) // seq_len
    inputs, targets = dataset.batch(np.arange(len(dataset)))
    assert inputs.dtype == targets.dtype == torch.int64
    assert inputs.is_contiguous() and targets.is_contiguous()
    assert inputs.flatten().tolist() == list(range(len(dataset) * seq_len))
    assert torch.equal(targets, inputs + 1)


def test_a_batch_follows_the_order_of_the_indices() -> None:
    inputs, _ = TokenDataset(np.arange(31), 10).batch(np.array([2, 0, 2]))
    assert inputs[:, 0].tolist() == [20, 0, 20]


def test_a_sample_past_the_end_is_an_error() -> None:
    dataset = TokenDataset(np.arange(39), 10)  # 8 tokens over, not enough for a fourth sample
    with pytest.raises(IndexError):
        dataset.batch(np.array([len(dataset)]))


def test_a_short_split_says_what_to_change() -> None:
    with pytest.raises(ValueError, match=r"val split has 5\n  fix: raise data.val_fraction or .* at most 4$"):
        TokenDataset(np.arange(5), 8, name="val")
    with pytest.raises(ValueError, match=r"model.seq_len=0"):
        TokenDataset(np.arange(5), 0)


@given(st.text())
def test_bytes_round_trip(line: str) -> None:
    tokenizer = ByteTokenizer()
    ids = tokenizer.encode(line)
    assert all(0 <= i < tokenizer.vocab_size for i in ids)
    assert tokenizer.decode(ids) == line
    assert tokenizer.decode(torch.tensor(ids, dtype=torch.int64)) == line


def test_bytes_decode_takes_any_id() -> None:
    assert ByteTokenizer().decode([97, 0xE2, 98, 300]) == "a\ufffdb\ufffd"


def test_file_tokenizer(tokenizer_file: str) -> None:
    tokenizer = load_tokenizer(tokenizer_file)
    ids = tokenizer.encode("the naïve cat")
    assert len(ids) < len(b"the naive cat")
    assert tokenizer.decode(ids) == "the naïve cat"
    assert max(ids) < tokenizer.vocab_size <= 300
    assert tokenizer.separator is not None and tokenizer.decode([tokenizer.separator]) == "<|endoftext|>"


def test_vocab_size_holds_the_largest_id(big_tokenizer_file: str) -> None:
    tokenizer = load_tokenizer(big_tokenizer_file)
    assert tokenizer.vocab_size == max(tokenizer.encode("the thought sat number cat")) + 1 > 70_000
    assert tokenizer.separator is None


def test_truncation_saved_in_a_tokenizer_file_is_lifted(tokenizer_file: str, tmp_path: Path) -> None:
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(tokenizer_file)
    tokenizer.enable_truncation(2)
    tokenizer.enable_padding(length=100)
    tokenizer.save(str(tmp_path / "short.json"))
    long = "the cat sat on the mat"
    lifted = load_tokenizer(str(tmp_path / "short.json"))
    assert lifted.encode(long) == load_tokenizer(tokenizer_file).encode(long)


def test_bad_tokenizers_are_refused(tmp_path: Path, tokenizer_file: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match=r"data.tokenizer='nowhere.json' is not a file"):
        load_tokenizer("nowhere.json")
    (tmp_path / "bad.json").write_text("{}")
    with pytest.raises(ValueError, match=r"bad.json' is not a `tokenizers` JSON file"):
        load_tokenizer(str(tmp_path / "bad.json"))
    monkeypatch.setattr(text, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r"pip install 'dtrain\[text\]'"):
        load_tokenizer(tokenizer_file)


def test_few_documents_hold_out_the_tail(small_folder: Path) -> None:
    data = Text(str(small_folder), seq_len=8, val_fraction=0.25)
    train, val = data.dataset("train").tokens, data.dataset("val").tokens
    documents = [path.read_bytes() for path in sorted(small_folder.rglob("*.txt"))]
    assert np.concatenate([train, val]).tobytes() == b"\0".join(documents)
    assert len(val) == (len(train) + len(val)) // 4


def test_one_file(tmp_path: Path) -> None:
    (tmp_path / "book.md").write_text("héllo wörld " * 50)
    data = Text(str(tmp_path / "book.md"), seq_len=17)
    assert data.vocab_size == 256
    inputs, _ = data.dataset("train").batch(np.array([0]))
    assert data.decode(inputs[0]) == "héllo wörld hé"
    assert data.dataset("train") is data.dataset("train")


def test_many_documents_hold_out_whole_documents(folder: Path) -> None:
    data = Text(str(folder), seq_len=8, val_fraction=0.2)
    parts = {split: set(data.dataset(split).tokens.tobytes().split(b"\0")) for split in ("train", "val")}
    assert len(parts["val"]) > 1
    assert not parts["train"] & parts["val"]
    assert parts["train"] | parts["val"] == {path.read_bytes() for path in folder.rglob("*.txt")}


def test_text_with_a_tokenizer(folder: Path, tokenizer_file: str) -> None:
    data = Text(str(folder), seq_len=8, tokenizer=tokenizer_file)
    tokens = data.dataset("train").tokens
    assert tokens.dtype == np.uint16
    texts = data.decode(tokens).split("<|endoftext|>")
    written = {path.read_text() for path in folder.rglob("*.txt")}
    assert set(texts) < written and len(texts) == len(set(texts))


def test_pattern_chooses_the_files(folder: Path) -> None:
    (folder / "note.md").write_text("only this " * 20)
    data = Text(str(folder), seq_len=8, pattern="*.md")
    assert data.dataset("train").tokens.tobytes().startswith(b"only this only")


def test_a_tokenizer_needs_utf8(tmp_path: Path, tokenizer_file: str) -> None:
    (tmp_path / "latin.txt").write_bytes(b"caf\xe9 " * 50)
    assert len(Text(str(tmp_path), seq_len=8).dataset("train")) > 0
    with pytest.raises(ValueError, match=r"latin.txt' is not UTF-8"):
        Text(str(tmp_path), seq_len=8, tokenizer=tokenizer_file).dataset("train")


def test_constructor_and_check_refuse_bad_settings(tmp_path: Path, folder: Path) -> None:
    (tmp_path / "empty.txt").touch()
    (tmp_path / "hollow").mkdir()
    (tmp_path / "hollow" / "a.txt").touch()
    cases: list[tuple[dict, str]] = [
        ({"path": str(tmp_path / "nowhere")}, "data.path=.*nowhere' does not exist"),
        ({"path": str(tmp_path / "empty.txt")}, "empty.txt' is empty"),
        ({"path": str(tmp_path / "hollow")}, "hollow' is empty"),
        ({"path": str(folder), "pattern": "*.rst"}, r"no file that matches data.pattern='\*.rst'"),
        ({"path": str(folder), "pattern": ""}, "data.pattern='' must be a relative glob"),
        ({"path": str(folder), "pattern": "/a/*"}, "data.pattern='/a/\\*' must be a relative glob"),
        ({"path": str(folder), "val_fraction": 0.0}, "data.val_fraction=0.0"),
        ({"path": str(folder), "val_fraction": 1.0}, "data.val_fraction=1.0"),
        ({"path": str(folder), "tokenizer": "nowhere.json"}, "data.tokenizer='nowhere.json'"),
    ]
    for settings, message in cases:
        with pytest.raises(ValueError, match=message):
            text.check(**settings, seq_len=8)
        with pytest.raises(ValueError, match=message):
            Text(**settings, seq_len=8)
    text.check(path=str(folder), seq_len=8)


def test_unreadable_path_is_refused(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.access", lambda path, mode: False)  # chmod does not stop root
    with pytest.raises(ValueError, match="cannot be read by this user"):
        text.check(path=str(folder))


def test_unknown_split_is_refused(folder: Path) -> None:
    with pytest.raises(ValueError, match="split='test' must be 'train' or 'val'"):
        Text(str(folder), seq_len=8).dataset("test")


def test_the_constructor_reads_the_start_of_one_file(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[Path] = []

    def watch(path: Path) -> object:
        opened.append(path)
        return open_regular(path)

    monkeypatch.setattr("dtrain.data.files.open_regular", watch)
    data = Text(str(folder), seq_len=8)
    assert len(opened) == 1
    data.dataset("train")
    assert len(opened) > 20


def test_no_data_module_imports_torch() -> None:
    """The launcher checks data settings and must answer at once; torch takes seconds to import."""
    # what reads the user's own data
    of_ranks = {"__init__", "adapt", "arrays", "samples", "refuse", "collate", "fields", "seeding"}
    of_ranks |= {"stream", "stream_loader", "stream_reader"}
    names = sorted(path.stem for path in Path(text.__file__).parent.glob("*.py") if path.stem not in of_ranks)
    assert {"loader", "text", "stdlib", "tokens", "synthetic"} <= set(names)
    modules = ", ".join(f"dtrain.data.{name}" for name in names)
    code = f"import sys, {modules}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=Path(text.__file__).parents[2]).returncode == 0


@pytest.mark.parametrize("name", ["<eos>", "<｜end▁of▁sentence｜>", "[SEP]", None])
def test_a_tokenizer_without_an_end_is_spoken_of(
    name: str | None, folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    from tokenizers import Tokenizer, models

    words = {"cat": 0, "?": 1} | ({} if name is None else {name: 2})
    Tokenizer(models.WordLevel(words, unk_token="?")).save(str(tmp_path / "t.json"))
    text.check(path=str(folder), tokenizer=str(tmp_path / "t.json"))
    assert text.load_tokenizer(str(tmp_path / "t.json")).separator == (None if name is None else 2)
    assert ("without a separator" in caplog.text) == (name is None)
