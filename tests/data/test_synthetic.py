"""Synthetic data: pure, learnable, and the same rule in both splits."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dtrain.data.synthetic import NOISE, Synthetic, SyntheticDataset


def successors(dataset: SyntheticDataset) -> dict[int, int]:
    """The most frequent next token of each token."""
    inputs, targets = dataset.batch(np.arange(len(dataset)))
    counts: dict[int, dict[int, int]] = {}
    for x, y in zip(inputs.flatten().tolist(), targets.flatten().tolist(), strict=True):
        counts.setdefault(x, {}).setdefault(y, 0)
        counts[x][y] += 1
    return {x: max(row, key=row.__getitem__) for x, row in counts.items()}


@settings(max_examples=50)
@given(
    st.integers(1, 40),
    st.integers(2, 100_000),
    st.integers(0, 2**63),
    st.lists(st.integers(0, 99), min_size=1, max_size=8),
)
def test_a_sample_is_a_pure_function_of_seed_and_index(
    seq_len: int, vocab_size: int, seed: int, indices: list[int]
) -> None:
    inputs, targets = Synthetic(seq_len, vocab_size, 100, seed).dataset("train").batch(np.array(indices))
    assert inputs.shape == targets.shape == (len(indices), seq_len)
    assert inputs.dtype == targets.dtype == torch.int64
    assert torch.equal(inputs[:, 1:], targets[:, :-1])
    assert min(inputs.min(), targets.min()) >= 0 and max(inputs.max(), targets.max()) < vocab_size
    other = Synthetic(seq_len, vocab_size, 100, seed).dataset("train")
    for row, index in enumerate(indices):  # alone or in a batch, in any order
        assert torch.equal(other.batch(np.array([index]))[0][0], inputs[row])


@pytest.mark.parametrize("vocab_size", [2, 7, 256, 300, 50257])
def test_the_next_token_can_be_learned(vocab_size: int) -> None:
    """A table learned on train predicts val nine times in ten; chance would be 1 / 256 at most states."""
    data = Synthetic(seq_len=64, vocab_size=vocab_size, num_samples=1000)
    table = successors(data.dataset("train"))
    assert len(set(table.values())) == len(table) == min(vocab_size, 256)
    inputs, targets = data.dataset("val").batch(np.arange(100))
    guesses = torch.tensor([table[x] for x in inputs.flatten().tolist()])
    expected = 1 - NOISE + NOISE / len(table)
    assert (guesses == targets.flatten()).float().mean().item() == pytest.approx(expected, abs=0.02)


def test_large_vocabularies_are_used_from_end_to_end() -> None:
    inputs, _ = Synthetic(seq_len=64, vocab_size=50257).dataset("train").batch(np.arange(100))
    assert inputs.min() == 0 and inputs.max() > 49_000


def test_samples_seeds_and_splits_differ() -> None:
    def rows(seed: int, split: str) -> set[tuple[int, ...]]:
        dataset = Synthetic(seq_len=200, vocab_size=256, num_samples=200, seed=seed).dataset(split)
        return {tuple(row) for row in dataset.batch(np.arange(len(dataset)))[0].tolist()}

    parts = [rows(0, "train"), rows(0, "val"), rows(1, "train"), rows(1, "val")]
    assert [len(part) for part in parts] == [200, 20, 200, 20]
    assert len(set.union(*parts)) == 440


def test_text_is_bytes() -> None:
    data = Synthetic(seq_len=8, vocab_size=512)
    assert data.vocab_size == 512
    assert data.decode(data.encode("naïve")) == "naïve"


@pytest.mark.parametrize(
    "settings, message",
    [
        ({"seq_len": 0}, "model.seq_len=0 must be at least 1"),
        ({"vocab_size": 1}, "model.vocab_size=1 must be at least 2"),
        ({"num_samples": 0}, "data.num_samples=0"),
        ({"seed": -1}, "data.seed=-1"),
    ],
)
def test_bad_settings_are_refused(settings: dict[str, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Synthetic(**{"seq_len": 8, "vocab_size": 16, **settings})
    with pytest.raises(ValueError, match="split='test'"):
        Synthetic(seq_len=8, vocab_size=16).dataset("test")
