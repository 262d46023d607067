"""An IterableDataset that divides itself over the workers of its DataLoader."""

import itertools

import torch
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

import dtrain


class Numbers(IterableDataset):
    def __iter__(self):
        info = get_worker_info()
        for n in itertools.count(info.id if info else 0, info.num_workers if info else 1):
            yield torch.randn(8) + n % 3, n % 3


def my_loader():
    return DataLoader(Numbers(), batch_size=16, num_workers=4)


if __name__ == "__main__":
    model = (torch.nn.Linear, {"in_features": 8, "out_features": 3})
    dtrain.fit(model=model, data=my_loader, loss="cross_entropy", strategy="fsdp", processes=2, steps=8)
