"""Which layers have kernels of their own for one row. The kernels need a GPU: tests/kernels/test_one_row.py."""

from __future__ import annotations

import torch
from torch import nn

from dtrain.inference.one_row import fits, one_row_copy
from dtrain.models.gpt2 import GPT2
from dtrain.models.llama import Llama


def test_a_layer_that_is_not_as_llama_has_it_is_left_as_it_is() -> None:
    with torch.device("meta"):
        llama, gpt2 = Llama(1, 64, 4, 2, 128, 50, 16), GPT2(1, 64, 4, vocab_size=50, seq_len=16)
    assert one_row_copy(gpt2) is None
    block = llama.layers["0"]
    block.attention.q = nn.Sequential(block.attention.q)  # as an adapter wraps it
    assert not fits(block) and one_row_copy(llama) is None
    with torch.device("meta"):
        block = Llama(1, 64, 4, 2, 128, 50, 16).layers["0"]
    block.norm1.eps = None
    assert not fits(block)
