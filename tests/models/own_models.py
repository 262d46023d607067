"""Hugging Face models as a user writes them, for tests: ranks import this file."""

from typing import Any

import torch
from torch import nn
from torch.utils.data import Dataset


def gpt2() -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    return GPT2LMHeadModel(GPT2Config(n_layer=2, n_embd=16, n_head=2, vocab_size=31, n_positions=8, **NO_DROPOUT))


NO_DROPOUT = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}


def bert() -> nn.Module:
    from transformers import BertConfig, BertForSequenceClassification

    sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}
    return BertForSequenceClassification(
        BertConfig(vocab_size=31, max_position_embeddings=8, num_labels=3, **sizes)  # with dropout
    )


class Tokens(Dataset[Any]):
    """Rows of different lengths: the rest of the labels is -100."""

    def __init__(self, num: int = 48) -> None:
        self.num = num

    def __len__(self) -> int:
        return self.num

    def __getitem__(self, index: int) -> Any:
        ids = torch.tensor([(index + 3 * k) % 31 for k in range(8)])
        keep = torch.arange(8) < 4 + index % 5
        return {"input_ids": ids, "attention_mask": keep.long(), "labels": torch.where(keep, ids, -100)}


class Texts(Tokens):
    def __getitem__(self, index: int) -> Any:
        return {**super().__getitem__(index), "labels": index % 3}
