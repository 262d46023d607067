"""Text as training data: as bytes, or as the ids of a Hugging Face `tokenizers` file."""

from __future__ import annotations

from collections.abc import Iterable
from functools import cached_property
from importlib.util import find_spec
from pathlib import Path

import numpy as np

from dtrain.data import documents, token_stream
from dtrain.data.documents import Source
from dtrain.data.files import warn
from dtrain.data.packed import PackedDataset, make_dataset
from dtrain.data.token_stream import Piece, Tokenizer, Tokens
from dtrain.data.windows import TokenDataset
from dtrain.formats.bounded import read_bytes

TASK = "next"  # the kind of targets (dtrain/checks/validate.py)

# Names of the token that ends a document; the first that a tokenizer has is used: of GPT-2, Llama 3, Llama 2, Gemma,
# DeepSeek and BERT. Only append to this list: another choice would change the text of resumed runs.
END_OF_DOCUMENT = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "<｜end▁of▁sentence｜>", "[SEP]")


LARGEST_TOKENIZER = 2**28  # bytes; one of 256,000 tokens has 2**25


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
            self.tokenizer = HFTokenizer.from_str(read_bytes(Path(path).expanduser(), LARGEST_TOKENIZER).decode())
        except (KeyboardInterrupt, SystemExit):
            raise
        except BaseException as error:  # the Rust side raises a plain Exception, or panics
            raise ValueError(
                f"data.tokenizer={path!r} is not a `tokenizers` JSON file ({str(error)[:200]})\n"
                "  fix: give a tokenizer.json"
            ) from error
        # A file may contain its model's truncation (512 for BERT), which would drop text.
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
        dtype = token_stream.token_dtype(self.vocab_size)
        # Uses all cores; the fast version (tokenizers 0.20 on) skips the offsets: 4.2 s instead of 7.4 s on 11 MB.
        encode_batch = getattr(self.tokenizer, "encode_batch_fast", self.tokenizer.encode_batch)
        return [np.array(encoding.ids, dtype=dtype) for encoding in encode_batch(texts, add_special_tokens=False)]


def load_tokenizer(path: str | None) -> Tokenizer:
    """Return bytes if there is no path, otherwise the tokenizer file."""
    return ByteTokenizer() if path is None else FileTokenizer(path)


def check_tokenizer(path: str | None, setting: str = "data.tokenizer") -> None:
    """Refuse a tokenizer that cannot be loaded, without loading it."""
    if path is None:
        return
    if not Path(path).expanduser().is_file():
        bytes_by = "null for bytes" if setting == "data.tokenizer" else f"leave out {setting} for bytes"
        raise ValueError(f"{setting}={str(path)!r} is not a file\n  fix: give a tokenizer.json, or {bytes_by}")
    if find_spec("tokenizers") is None:
        raise ValueError(
            f"{setting}={str(path)!r} needs the tokenizers package, which is not installed\n  fix: "
            "pip install 'dtrain[text]', or set it to null for bytes"
        )


def check(
    path: str,
    tokenizer: str | None = None,
    val_fraction: float = 0.05,
    pattern: str | None = None,
    field: str = "text",
    setting: str = "data.path",
    **rest: object,
) -> dict[str, int]:
    """Refuse settings that cannot work, before launch; return the model's required settings. Reads at most a line."""
    if not 0 < val_fraction < 1:
        raise ValueError(f"data.val_fraction={val_fraction} must be between 0 and 1, ends excluded\n  fix: try 0.05")
    check_tokenizer(tokenizer)
    documents.check(path, pattern, field, setting)
    loaded = load_tokenizer(tokenizer)
    if loaded.separator is None:
        names = " ".join(END_OF_DOCUMENT)
        warn(f"data.tokenizer={tokenizer} has none of {names}: documents are joined without a separator")
    return {"vocab_size": loaded.vocab_size}


class Text:
    """Text files, JSON lines or a saved dataset; held in memory by every process.

    With 20 or more documents, whole documents are held out; with fewer, the tail of the token stream. For text that
    does not fit in memory, write a token folder (dtrain.data.tokens.prepare).
    """

    def __init__(
        self,
        path: str,
        seq_len: int,
        tokenizer: str | None = None,
        val_fraction: float = 0.05,
        pattern: str | None = None,
        field: str = "text",
        packed: bool = False,
    ) -> None:
        check(path, tokenizer=tokenizer, val_fraction=val_fraction, pattern=pattern, field=field)
        self.path = Path(path).expanduser()
        self.seq_len = seq_len
        self.tokenizer_path = tokenizer
        self.val_fraction = val_fraction
        self.pattern = pattern
        self.field = field
        self.packed = packed
        self._tokens: dict[str, Tokens] = {}
        self._datasets: dict[str, TokenDataset | PackedDataset] = {}

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

    def source(self) -> Source:
        return documents.open_source(self.path, self.pattern, self.field, self.val_fraction)

    def dataset(self, split: str) -> TokenDataset | PackedDataset:
        """Return the samples of "train" or "val"; the files are read at the first call."""
        token_stream.check_split(split)
        if split not in self._datasets:
            self._datasets[split] = make_dataset(self._read(split), self.seq_len, self.packed, split)
        return self._datasets[split]

    def _read(self, split: str) -> Tokens:
        if split not in self._tokens:
            source = self.source()
            parts = list(
                token_stream.token_stream(source.pieces("train" if source.cuts_tail else split), self.tokenizer)
            )
            nothing = Tokens(np.array([], dtype=np.uint8), np.array([], dtype=np.int64))
            read = Tokens(*map(np.concatenate, zip(*(parts or [nothing]), strict=True)))
            if source.cuts_tail:
                train, val = read.cut(token_stream.tail_start(len(read.tokens), self.val_fraction))
                self._tokens = {"train": train, "val": val}
            else:
                self._tokens[split] = read
        return self._tokens[split]
