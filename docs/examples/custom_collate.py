"""A DataLoader whose collate function pads samples of different lengths."""

import torch
from torch.nn import EmbeddingBag
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader

import dtrain


def pad(samples):
    return pad_sequence([x for x, _ in samples], batch_first=True), torch.tensor([y for _, y in samples])


def my_loader():
    return DataLoader([(torch.arange(n % 9 + 4), n % 3) for n in range(256)], batch_size=16, collate_fn=pad)


if __name__ == "__main__":
    model = (EmbeddingBag, {"num_embeddings": 64, "embedding_dim": 3})
    dtrain.fit(model=model, data=my_loader, loss="cross_entropy", strategy="fsdp", processes=2, epochs=1)
