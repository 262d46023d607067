"""Samples that are dicts, for a model that is called by name and returns its loss."""

import torch
from torch import nn

import dtrain


class TwoTowers(nn.Module):
    def __init__(self):
        super().__init__()
        self.user, self.item = nn.Linear(8, 16), nn.Linear(4, 16)

    def forward(self, user, item, rating):
        score = (self.user(user) * self.item(item)).sum(-1)
        return {"loss": (score - rating).square().mean(), "score": score}


def my_data():
    return [{"user": torch.randn(8), "item": torch.randn(4), "rating": float(n % 5)} for n in range(256)]


if __name__ == "__main__":
    dtrain.fit(model=TwoTowers, data=my_data, strategy="fsdp", processes=2, epochs=1)
