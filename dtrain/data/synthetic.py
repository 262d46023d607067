"""Synthetic data that a model can learn: for benchmarks, tests and a first run without any file."""

from __future__ import annotations

from collections.abc import Iterable
from math import gcd
from typing import TYPE_CHECKING

import numpy as np

from dtrain.data.counter_rng import GOLDEN, bits, mix
from dtrain.data.text import ByteTokenizer
from dtrain.data.token_stream import check_split
from dtrain.data.windows import IGNORED

if TYPE_CHECKING:
    from torch import Tensor

TASK = "next"  # the kind of targets (dtrain/checks/validate.py)

NOISE = 0.1
# A rule over the whole vocabulary would be a table of 50,000 entries to learn; with 256 the loss falls quickly.
MAX_STATES = 256


class SyntheticDataset:
    """state -> (a * state + 3) mod states, except that one token in ten is drawn at random.

    With 256 states the loss starts near ln(vocab_size) and can fall to 0.88, the entropy of the draws.
    """

    def __init__(self, seq_len: int, vocab_size: int, num_samples: int, seed: int, first: int) -> None:
        self.seq_len = seq_len
        self.num_samples = num_samples
        self.seed = seed
        self.first = first
        self.num_states = min(vocab_size, MAX_STATES)
        # Spread over the vocabulary, so that every shard of a sharded embedding has work.
        self.stride = vocab_size // self.num_states
        # Coprime with the number of states, so that every state has one successor and one predecessor.
        multiplier = next(a for a in range(5, 5 + 2 * self.num_states) if gcd(a, self.num_states) == 1)
        # The rule applied k times is scale[k] * state + shift[k], so a sample needs no loop over its tokens.
        scale, shift = [1], [0]
        for _ in range(seq_len):
            scale.append(scale[-1] * multiplier % self.num_states)
            shift.append((shift[-1] * multiplier + 3) % self.num_states)
        self.scale, self.shift = np.array(scale), np.array(shift)

    def __len__(self) -> int:
        return self.num_samples

    def batch(self, indices: np.ndarray) -> tuple[Tensor, Tensor]:
        import torch

        place = np.arange(self.seq_len + 1)
        key = mix(np.array([self.seed], dtype=np.uint64) + GOLDEN)
        sample = mix(key + np.asarray(indices).astype(np.uint64) + np.uint64(self.first))
        random = bits(sample, self.seq_len + 1)
        drawn = (random >> np.uint64(32)).astype(np.int64) % self.num_states
        is_drawn = (random & np.uint64(0xFFFFFFFF)).astype(np.int64) < int(NOISE * 2**32)
        # Each token follows from the last draw at or before it; the first token counts as drawn.
        last = np.maximum.accumulate(np.where(is_drawn, place, 0), axis=1)
        steps = place - last
        origin = np.take_along_axis(drawn, last, axis=1)
        states = (self.scale[steps] * origin + self.shift[steps]) % self.num_states
        windows = torch.from_numpy(states * self.stride)
        return windows[:, :-1].contiguous(), windows[:, 1:].contiguous()


class UnevenDataset(SyntheticDataset):
    """Samples that no layout divides evenly: from one to all of the targets count, and one input token is redrawn.

    A mean of the means of ranks or micro-batches is not the mean over all targets, and a draw that does not come from
    the sample's own key differs between layouts.
    """

    masked = True
    draws = True

    def batch(self, indices: np.ndarray, keys: np.ndarray) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        import torch

        inputs, targets = super().batch(indices)
        draw = (bits(keys, 3) >> np.uint64(33)).astype(np.int64)
        rows = torch.arange(len(inputs))
        inputs[rows, torch.from_numpy(draw[:, 0] % self.seq_len)] = torch.from_numpy(
            draw[:, 1] % self.num_states * self.stride
        )
        # the square of a uniform draw: most samples are short, some are long
        length = (1 + (draw[:, 2] / 2**31) ** 2 * self.seq_len).astype(np.int64)
        targets[torch.arange(self.seq_len) >= torch.from_numpy(length)[:, None]] = IGNORED
        return inputs, targets


class Synthetic:
    """Sample i is a pure function of (seed, i); validation follows the same rule with other samples."""

    def __init__(
        self, seq_len: int, vocab_size: int, num_samples: int = 10000, seed: int = 0, uneven: bool = False
    ) -> None:
        for setting, value, least in (
            ("model.seq_len", seq_len, 1),
            ("model.vocab_size", vocab_size, 2),
            ("data.num_samples", num_samples, 1),
            ("data.seed", seed, 0),
        ):
            if value < least:
                raise ValueError(f"{setting}={value} must be at least {least}")
        self.vocab_size = vocab_size
        self._tokenizer = ByteTokenizer()
        num_val = max(1, num_samples // 10)
        kind = UnevenDataset if uneven else SyntheticDataset
        self._datasets = {
            "train": kind(seq_len, vocab_size, num_samples, seed, first=0),
            "val": kind(seq_len, vocab_size, num_val, seed, first=num_samples),
        }

    def encode(self, text: str) -> list[int]:
        return self._tokenizer.encode(text)

    def decode(self, ids: Iterable[int]) -> str:
        return self._tokenizer.decode(ids)

    def dataset(self, split: str) -> SyntheticDataset:
        """The samples of "train" or "val"."""
        check_split(split)
        return self._datasets[split]
