"""Masked tokens: how many, which, replaced by what, and drawn from the keys alone."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dtrain.data import masked_lm, tokens
from dtrain.data.counter_rng import sample_keys
from dtrain.data.loader import Loader
from dtrain.data.masked_lm import BYTE_MASK, IGNORED, Masked, MaskedDataset
from dtrain.data.windows import TokenDataset
from dtrain.models import layers
from tests.data.conftest import SENTENCE


@pytest.fixture(scope="session")
def bert_tokenizer(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Words with BERT's special tokens; [PAD] is not 0."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = f"[UNK] [PAD] [CLS] [SEP] [MASK] {SENTENCE}".split()
    vocabulary = {word: n for n, word in enumerate(dict.fromkeys(words))}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    path = tmp_path_factory.mktemp("bert") / "tokenizer.json"
    tokenizer.save(str(path))
    return str(path)


def windows(seq_len: int, count: int = 400) -> TokenDataset:
    return TokenDataset(np.random.default_rng(0).integers(0, 200, seq_len * count + 1).astype(np.uint8), seq_len)


def drawn(dataset: MaskedDataset, seed: int = 0) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(original, inputs, targets) of all samples."""
    everything = np.arange(len(dataset))
    inputs, targets = dataset.batch(everything, sample_keys(seed, 0, everything))
    assert inputs.dtype == targets.dtype == torch.int64 and inputs.shape == targets.shape
    return dataset.windows.batch(everything)[0].numpy(), inputs.numpy(), targets.numpy()


@settings(deadline=None, max_examples=30)
@given(st.integers(4, 300), st.floats(0.15, 0.9), st.integers(0, 2**32))
def test_every_sample_has_as_many_targets_and_the_rest_is_left_alone(seq_len: int, share: float, seed: int) -> None:
    dataset = MaskedDataset(windows(seq_len, 20), 256, 256, share)
    original, inputs, targets = drawn(dataset, seed)
    assert ((targets != IGNORED).sum(axis=1) == dataset.num_targets).all()
    asked = targets != IGNORED
    assert (asked.sum(axis=1) == round(share * seq_len)).all()
    assert (targets[asked] == original[asked]).all()
    assert (inputs[~asked] == original[~asked]).all()
    assert inputs.min() >= 0 and inputs.max() <= 256


def test_eight_of_ten_are_hidden_one_is_another_token_one_is_left() -> None:
    original, inputs, targets = drawn(MaskedDataset(windows(128), 256, 256, 0.15))
    asked = targets != IGNORED
    count = asked.sum()
    assert count == 400 * 19
    assert (inputs[asked] == 256).sum() / count == pytest.approx(0.8, abs=0.02)
    assert (inputs[asked] == original[asked]).sum() / count == pytest.approx(0.1 + 0.1 / 256, abs=0.015)
    others = inputs[asked & (inputs != 256) & (inputs != original)]
    assert len(np.unique(others)) > 200 and others.max() > 240, "from the whole vocabulary"
    assert asked.mean(axis=0).std() < 0.03, "each place as often as others"


def test_draws_come_from_the_keys_alone() -> None:
    dataset = MaskedDataset(windows(64), 256, 256, 0.15)
    keys = sample_keys(0, 0, np.arange(8))
    inputs, targets = dataset.batch(np.arange(8), keys)
    order = np.array([5, 2])
    some_inputs, some_targets = dataset.batch(order, keys[order])
    assert torch.equal(some_inputs, inputs[order]) and torch.equal(some_targets, targets[order])
    assert not torch.equal(dataset.batch(np.arange(8), sample_keys(0, 1, np.arange(8)))[1], targets), "another epoch"
    assert IGNORED == layers.IGNORED


def test_validation_has_the_same_masks_every_time_and_training_new_ones() -> None:
    dataset = MaskedDataset(windows(16, 8), 256, 256, 0.25)
    val = Loader(dataset, 8, 0, shuffle=False)
    assert torch.equal(val.batch(0)[1], val.batch(8)[1]), "8 samples: the next epoch"
    train = Loader(dataset, 8, 0)
    first, second = (targets[np.argsort(train.indices(p))] for p in (0, 8) for targets in [train.batch(p)[1]])
    assert not torch.equal(first, second)
    resumed = Loader(dataset, 8, 0)
    assert all(torch.equal(a, b) for a, b in zip(train.batch(8), resumed.batch(8), strict=True))


def test_the_standard_library_as_masked_bytes() -> None:
    data = Masked(seq_len=64)
    assert data.vocab_size == BYTE_MASK + 1 == masked_lm.check(seq_len=64)["vocab_size"]
    dataset = data.dataset("val")
    assert len(dataset) > 1000 and dataset.fingerprint == data.source.dataset("val").fingerprint
    inputs, targets = dataset.batch(np.arange(4), sample_keys(0, 0, np.arange(4)))
    assert (inputs == BYTE_MASK).any() and ((targets != IGNORED).sum(dim=1) == 10).all()


def test_files_and_token_folders_with_a_tokenizer(folder: Path, bert_tokenizer: str, tmp_path: Path) -> None:
    data = Masked(8, str(folder), bert_tokenizer)
    tokens.prepare(folder, tmp_path / "out", bert_tokenizer)
    prepared = Masked(8, str(tmp_path / "out"))
    everything = np.arange(len(data.dataset("train")))
    keys = sample_keys(0, 0, everything)
    for made in (data, prepared):
        assert (made.mask_id, made.vocab_size) == (4, 15)
        assert (made.dataset("train").batch(everything, keys)[0] == 4).any()
    assert len(prepared.dataset("train")) == len(data.dataset("train"))
    assert data.decode(data.encode("the cat")) == "the cat"


def test_what_cannot_work_is_refused(folder: Path, tokenizer_file: str, bert_tokenizer: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"(?s)data.tokenizer=.*has no token \[MASK\].*fix: .*data.tokenizer=null"):
        masked_lm.check(16, str(folder), tokenizer_file)
    with pytest.raises(ValueError, match=r"(?s)data.share=0.15: .*model.seq_len=3\n  fix: model.seq_len=8"):
        masked_lm.check(3)
    with pytest.raises(ValueError, match=r"data.share=1.5: must be between 0 and 1"):
        masked_lm.check(16, share=1.5)
    with pytest.raises(ValueError, match=r"does not exist"):
        masked_lm.check(16, str(tmp_path / "nothing"))
    tokens.prepare(folder, tmp_path / "out")
    with pytest.raises(ValueError, match=r"(?s)data.tokenizer=.*its own\n  fix: data.tokenizer=null"):
        masked_lm.check(16, str(tmp_path / "out"), bert_tokenizer)


def test_the_check_imports_no_torch() -> None:
    code = "from dtrain.data import masked_lm, stdlib_lines; masked_lm.check(16); stdlib_lines.check(16, 0)"
    code += "; import sys; print('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout == "False\n"
