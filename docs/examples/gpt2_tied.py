"""Hugging Face's GPT-2 with its tied weights, built from a config; labels are the inputs, and the model shifts them."""

import torch
from transformers import GPT2Config, GPT2LMHeadModel

import dtrain


def my_model():
    return GPT2LMHeadModel(GPT2Config(vocab_size=64, n_positions=16, n_embd=32, n_layer=2, n_head=2))


def my_data():
    return [{"input_ids": row, "labels": row} for row in torch.randint(0, 64, (256, 16))]


if __name__ == "__main__":
    dtrain.fit(model=my_model, data=my_data, strategy="fsdp", processes=2, epochs=1)
