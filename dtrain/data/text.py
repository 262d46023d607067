"""Text files as training data: bytes by default, or the ids of a Hugging Face `tokenizers` file."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable
from functools import cached_property
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from dtrain.data import corpus
from dtrain.data.corpus import Piece, Tokenizer

if TYPE_CHECKING:
    from torch import Tensor

END_OF_DOCUMENT = ("<|endoftext|>", "<|end_of_text|>", "</s>")


class TokenDataset:
    """Consecutive windows of one token array; targets are the inputs moved on by one."""

    def __init__(self, tokens: np.ndarray, seq_len: int, name: str = "data") -> None:
        if seq_len < 1:
            raise ValueError(f"model.seq_len={seq_len} must be at least 1")
        self.tokens = tokens
        self.seq_len = seq_len
        self.num_samples = (len(tokens) - 1) // seq_len
        if self.num_samples < 1:
            fix = "raise data.val_fraction" if name == "val" else "add text"
            raise ValueError(
                f"model.seq_len={seq_len} needs at least {seq_len + 1} tokens for one sample, but the {name} "
                f"split has {len(tokens)}\n  fix: {fix} or set model.seq_len to at most {max(1, len(tokens) - 1)}"
            )

    @property
    def fingerprint(self) -> str:
        """Which text this is: its length and a hash of 256 places in it, quick also for a file of a terabyte."""
        places = np.linspace(0, max(0, len(self.tokens) - 64), 256).astype(np.int64)
        windows = self.tokens[places[:, None] + np.arange(min(64, len(self.tokens)))]
        return hashlib.sha256(np.ascontiguousarray(windows).astype("<u4").tobytes()).hexdigest()[:16]

    def __len__(self) -> int:
        return self.num_samples

    def batch(self, indices: np.ndarray) -> tuple[Tensor, Tensor]:
        import torch

        # One gather for the batch, and only these windows become int64: a memmap stays on disk.
        where = np.asarray(indices)[:, None] * self.seq_len + np.arange(self.seq_len + 1)
        windows = torch.from_numpy(np.asarray(self.tokens[where]).astype(np.int64))
        return windows[:, :-1].contiguous(), windows[:, 1:].contiguous()


class ByteTokenizer:
    """UTF-8 bytes as tokens: no file, no download, every text is representable."""

    vocab_size = 256
    separator = 0

    def encode(self, text: str) -> list[int]:
        return list(text.encode("utf-8"))

    def decode(self, ids: Iterable[int]) -> str:
        # A model's vocabulary may be padded beyond 256; 255 is never valid UTF-8, so it shows as U+FFFD.
        return bytes(min(int(i), 255) for i in ids).decode("utf-8", errors="replace")

    def encode_pieces(self, pieces: list[Piece]) -> list[np.ndarray]:
        return [np.frombuffer(piece.data, dtype=np.uint8) for piece in pieces]


class FileTokenizer:
    """A Hugging Face `tokenizers` JSON file."""

    def __init__(self, path: str) -> None:
        check_tokenizer(path)
        from tokenizers import Tokenizer as HFTokenizer

        try:
            self.tokenizer = HFTokenizer.from_file(str(Path(path).expanduser()))
        except Exception as error:  # the Rust side raises a plain Exception
            raise ValueError(
                f"data.tokenizer={path!r} is not a `tokenizers` JSON file ({error})\n  fix: give a tokenizer.json"
            ) from error
        # A file may carry the truncation of the model it was saved with (512 for BERT): that would drop text.
        self.tokenizer.no_truncation()
        self.tokenizer.no_padding()
        vocabulary = self.tokenizer.get_vocab(with_added_tokens=True)
        # Not the number of entries: ids may have gaps, and the embedding must hold the largest.
        self.vocab_size = max(vocabulary.values(), default=-1) + 1
        if self.vocab_size < 1:
            raise ValueError(f"data.tokenizer={path!r} has an empty vocabulary\n  fix: give a trained tokenizer")
        self.separator = next((vocabulary[token] for token in END_OF_DOCUMENT if token in vocabulary), None)

    def encode(self, text: str) -> list[int]:
        return self.tokenizer.encode(text, add_special_tokens=False).ids

    def decode(self, ids: Iterable[int]) -> str:
        return self.tokenizer.decode([int(i) for i in ids], skip_special_tokens=False)

    def encode_pieces(self, pieces: list[Piece]) -> list[np.ndarray]:
        texts = []
        for piece in pieces:
            try:
                texts.append(piece.data.decode("utf-8"))
            except UnicodeDecodeError as error:
                raise ValueError(
                    f"document {str(piece.path)!r} is not UTF-8 ({error.reason}), which data.tokenizer "
                    "needs\n  fix: convert it, or leave data.tokenizer empty to train on bytes"
                ) from error
        dtype = corpus.token_dtype(self.vocab_size)
        # Uses all cores; the fast one (tokenizers 0.20 on) leaves out the offsets: 4.2 s for 7.4 s on 11 MB.
        encode_batch = getattr(self.tokenizer, "encode_batch_fast", self.tokenizer.encode_batch)
        return [np.array(encoding.ids, dtype=dtype) for encoding in encode_batch(texts, add_special_tokens=False)]


def load_tokenizer(path: str | None) -> Tokenizer:
    """Bytes when there is no path, else the tokenizer file."""
    return ByteTokenizer() if path is None else FileTokenizer(path)


def check_tokenizer(path: str | None, setting: str = "data.tokenizer") -> None:
    """Refuse a tokenizer that cannot be loaded, without loading it."""
    if path is None:
        return
    if not Path(path).expanduser().is_file():
        raise ValueError(f"{setting}={str(path)!r} is not a file\n  fix: give a tokenizer.json, or null for bytes")
    if find_spec("tokenizers") is None:
        raise ValueError(
            f"{setting}={str(path)!r} needs the tokenizers package, which is not installed\n  fix: "
            "pip install 'dtrain[text]', or set it to null for bytes"
        )


def check(
    path: str,
    tokenizer: str | None = None,
    val_fraction: float = 0.05,
    pattern: str = "**/*.txt",
    setting: str = "data.path",
    **rest: object,
) -> dict[str, int]:
    """Refuse settings that cannot work, before anything is started; what the model must have. Reads no text."""
    if not 0 < val_fraction < 1:
        raise ValueError(f"data.val_fraction={val_fraction} must be between 0 and 1, ends excluded\n  fix: try 0.05")
    check_tokenizer(tokenizer)
    root = Path(path).expanduser()
    if not os.path.exists(root):
        raise ValueError(f"{setting}={str(path)!r} does not exist\n  fix: give a text file or a folder of them")
    if not os.access(root, os.R_OK):
        raise ValueError(f"{setting}={str(path)!r} cannot be read by this user\n  fix: its permissions")
    files = [root] if root.is_file() else corpus.list_files(root, pattern)
    sizes = (file.lstat().st_size for file in files)  # lazily: one file that is not empty is enough
    first = next(sizes, None)
    if first is None:
        raise ValueError(
            f"{setting}={str(path)!r} has no file that matches data.pattern={pattern!r}\n  fix: "
            "change the pattern, e.g. '**/*.md', or the path"
        )
    if first == 0 and not any(sizes):
        raise ValueError(f"{setting}={str(path)!r} is empty\n  fix: give a file or folder with text in it")
    return {"vocab_size": load_tokenizer(tokenizer).vocab_size}


def find_documents(path: Path, pattern: str) -> tuple[Path, list[str]]:
    """The folder and its documents' relative posix paths, sorted, so that all machines agree."""
    if path.is_file():
        return path.parent, [path.name]
    return path, sorted(file.relative_to(path).as_posix() for file in corpus.list_files(path, pattern))


class Text:
    """A text file, or a folder whose matching files are the documents; held in memory by every process.

    From 20 documents on, whole documents are held out (by a hash of their relative path), else the tail of
    the token stream. For text that does not fit in memory, write a token folder (dtrain.data.tokens.prepare).
    """

    def __init__(
        self,
        path: str,
        seq_len: int,
        tokenizer: str | None = None,
        val_fraction: float = 0.05,
        pattern: str = "**/*.txt",
    ) -> None:
        check(path, tokenizer=tokenizer, val_fraction=val_fraction, pattern=pattern)
        self.path = Path(path).expanduser()
        self.seq_len = seq_len
        self.tokenizer_path = tokenizer
        self.val_fraction = val_fraction
        self.pattern = pattern
        self._tokens: dict[str, np.ndarray] = {}
        self._datasets: dict[str, TokenDataset] = {}

    @cached_property
    def tokenizer(self) -> Tokenizer:
        return load_tokenizer(self.tokenizer_path)

    @property
    def vocab_size(self) -> int:
        return self.tokenizer.vocab_size

    def encode(self, text: str) -> list[int]:
        return self.tokenizer.encode(text)

    def decode(self, ids: Iterable[int]) -> str:
        return self.tokenizer.decode(ids)

    def documents(self) -> tuple[Path, list[str]]:
        return find_documents(self.path, self.pattern)

    def dataset(self, split: str) -> TokenDataset:
        """The samples of "train" or "val"; the files are read at the first call."""
        corpus.check_split(split)
        if split not in self._datasets:
            self._datasets[split] = TokenDataset(self._read(split), self.seq_len, name=split)
        return self._datasets[split]

    def _read(self, split: str) -> np.ndarray:
        if split not in self._tokens:
            root, names = self.documents()
            train, val = corpus.split_documents(names, self.val_fraction)
            chosen = val if split == "val" and val else train
            pieces = list(corpus.token_stream([root / name for name in chosen], self.tokenizer))
            tokens = np.concatenate(pieces) if pieces else np.array([], dtype=np.uint8)
            if val:
                self._tokens[split] = tokens
            else:
                start = corpus.tail_start(len(tokens), self.val_fraction)
                self._tokens = {"train": tokens[:start], "val": tokens[start:]}
        return self._tokens[split]
