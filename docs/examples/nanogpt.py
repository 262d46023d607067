"""A module that takes a config object and returns (logits, loss), with its tokens in one array."""

import numpy as np
import torch
from nanogpt_model import GPT, GPTConfig

import dtrain


def my_model():
    return GPT(GPTConfig(block_size=16, vocab_size=64))


def my_data():
    tokens = torch.from_numpy(np.random.randint(0, 64, 4097))
    return tokens[:-1].view(-1, 16), tokens[1:].view(-1, 16)


if __name__ == "__main__":
    dtrain.fit(model=my_model, data=my_data, strategy="fsdp", processes=2, epochs=1)
