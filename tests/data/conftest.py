"""A tiny tokenizer file and a folder of documents."""

from pathlib import Path

import pytest
from hypothesis import settings

settings.register_profile("data", deadline=None)  # a busy machine is no fault
settings.load_profile("data")

SENTENCE = "the cat sat on the mat and thought about the naïve cat number "


@pytest.fixture(scope="session")
def tokenizer_file(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A byte-level BPE of a few hundred tokens, trained here."""
    from tokenizers import ByteLevelBPETokenizer

    tokenizer = ByteLevelBPETokenizer()
    tokenizer.train_from_iterator([SENTENCE * 5], vocab_size=300, special_tokens=["<|endoftext|>"])
    path = tmp_path_factory.mktemp("tokenizer") / "tiny.json"
    tokenizer.save(str(path))
    return str(path)


@pytest.fixture(scope="session")
def big_tokenizer_file(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Words with ids on both sides of 65536, so that uint16 would wrap."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = {word: 70_000 + n for n, word in enumerate(sorted(set(SENTENCE.split())))}
    words |= {str(n): n for n in range(100)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="0"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    path = tmp_path_factory.mktemp("tokenizer") / "big.json"
    tokenizer.save(str(path))
    return str(path)


def write_documents(folder: Path, count: int) -> Path:
    """`count` documents in two levels of folders; each has its number in it, so none is like another."""
    for n in range(count):
        path = folder / f"part-{n % 3}" / f"{n:03}.txt"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{SENTENCE}{n}\n" * 5)
    return folder


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """40 documents: split by document."""
    return write_documents(tmp_path / "documents", 40)


@pytest.fixture
def small_folder(tmp_path: Path) -> Path:
    """3 documents: split by the tail."""
    return write_documents(tmp_path / "few", 3)
