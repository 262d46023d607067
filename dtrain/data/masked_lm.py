"""Masked language modelling: windows of text in which some tokens are hidden and predicted (Devlin et al., 2018)."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from dtrain.data import stdlib, text, tokens
from dtrain.data.counter_rng import bits
from dtrain.data.windows import IGNORED
from dtrain.errors import bad

if TYPE_CHECKING:
    from torch import Tensor

TASK = "mlm"  # the kind of targets (dtrain/checks/validate.py)

MASK = "[MASK]"
BYTE_MASK = 256  # the first id after the bytes


def kind_of(path: str | None) -> Any:
    """Return the module for the text's source: the standard library, a token folder, or files."""
    if path is None:
        return stdlib
    return tokens if os.path.isfile(Path(path).expanduser() / "meta.json") else text


def mask_token(tokenizer: str | None) -> tuple[int, int]:
    """Return (id of the mask token, vocabulary size with it): reserved after the bytes, or the file's own."""
    if tokenizer is None:
        return BYTE_MASK, BYTE_MASK + 1
    loaded = text.FileTokenizer(tokenizer)
    found = loaded.tokenizer.token_to_id(MASK)
    if found is None:
        fix = "the tokenizer.json of a BERT, or data.tokenizer=null for bytes"
        raise bad("data.tokenizer", tokenizer, f"has no token {MASK}, which masked tokens are replaced by", fix)
    return found, loaded.vocab_size


def tokenizer_of(path: str | None, tokenizer: str | None) -> str | None:
    """Return the tokenizer file of the ids: a token folder has its own."""
    if kind_of(path) is not tokens:
        return tokenizer
    assert path is not None
    own = tokens.read_meta(path)["tokenizer"]
    if tokenizer is not None:
        rule = f"the token folder data.path={path} was written with its own"
        raise bad("data.tokenizer", tokenizer, rule, "data.tokenizer=null")
    return None if own is None else str(Path(path).expanduser() / own)


def num_masked(seq_len: int, share: float) -> int:
    """Return how many tokens of a window are predicted: the same for all, so that means over samples are exact."""
    return round(share * seq_len)


def check(
    seq_len: int, path: str | None = None, tokenizer: str | None = None, share: float = 0.15, **rest: Any
) -> dict[str, int]:
    """Refuse settings that cannot work, before the launch; return the model's required settings. Imports no torch."""
    if not 0 < share < 1:
        raise bad("data.share", share, "must be between 0 and 1, ends excluded", "data.share=0.15")
    if not num_masked(seq_len, share):
        rule = f"masks no token of a window of model.seq_len={seq_len}"
        raise bad("data.share", share, rule, f"model.seq_len={round(1 / share) + 1} or more")
    file = tokenizer_of(path, tokenizer)
    kind_of(path).check(path=path, tokenizer=tokenizer, **rest)
    return {"vocab_size": mask_token(file)[1]}


class MaskedDataset:
    """Windows of another dataset; `share` of the tokens of each are targets, all others are IGNORED.

    Of the targets, 80% are replaced by the mask token, 10% by a random token, and 10% are kept, as published. The
    choice depends only on the sample's key.
    """

    draws = True

    def __init__(self, windows: Any, mask_id: int, vocab_size: int, share: float) -> None:
        self.windows, self.mask_id, self.vocab_size, self.share = windows, mask_id, vocab_size, share

    @property
    def fingerprint(self) -> str:
        return str(self.windows.fingerprint)

    @property
    def num_targets(self) -> int:
        """Of each sample."""
        return num_masked(self.windows.seq_len, self.share)

    def __len__(self) -> int:
        return len(self.windows)

    def batch(self, indices: np.ndarray, keys: np.ndarray) -> tuple[Tensor, Tensor]:
        import torch

        original = self.windows.batch(indices)[0].numpy()
        length = original.shape[1]
        random = bits(keys, 2 * length)
        # Predict the tokens with the smallest draws. The position in the low bits makes each draw unique.
        order = (random[:, :length] << np.uint64(length.bit_length())) | np.arange(length, dtype=np.uint64)
        last = num_masked(length, self.share) - 1
        asked = order <= np.partition(order, last, axis=1)[:, last : last + 1]
        action, drawn = random[:, length:] >> np.uint64(32), random[:, length:] & np.uint64(0xFFFFFFFF)
        other = np.where(action % 10 < 8, self.mask_id, (drawn % self.vocab_size).astype(np.int64))
        inputs = np.where(asked & (action % 10 < 9), other, original)
        return torch.from_numpy(inputs), torch.from_numpy(np.where(asked, original, IGNORED))


class Masked:
    """Masked tokens of text files, of a token folder (dtrain data prepare), or without a path of Python's library.

    A window is only text, starting anywhere: without [CLS], and without a second sentence.
    """

    def __init__(
        self,
        seq_len: int,
        path: str | None = None,
        tokenizer: str | None = None,
        val_fraction: float = 0.05,
        pattern: str | None = None,
        field: str = "text",
        share: float = 0.15,
    ) -> None:
        check(seq_len, path, tokenizer, share, val_fraction=val_fraction, pattern=pattern, field=field)
        self.share = share
        self.mask_id, self.vocab_size = mask_token(tokenizer_of(path, tokenizer))
        self.source: stdlib.Stdlib | text.Text | tokens.Tokens
        if path is None:
            self.source = stdlib.Stdlib(seq_len, val_fraction)
        elif kind_of(path) is tokens:
            self.source = tokens.Tokens(path, seq_len)
        else:
            self.source = text.Text(path, seq_len, tokenizer, val_fraction, pattern, field)

    def encode(self, text: str) -> list[int]:
        return self.source.encode(text)

    def decode(self, ids: Iterable[int]) -> str:
        return self.source.decode(ids)

    def dataset(self, split: str) -> MaskedDataset:
        """The samples of "train" or "val"."""
        windows = self.source.dataset(split)
        return MaskedDataset(windows, self.mask_id, self.source.vocab_size, self.share)
