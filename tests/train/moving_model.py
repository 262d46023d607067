"""A user's model that legally changes a weight in its forward pass, as a moving average of another one does."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from dtrain.models.gpt2 import GPT2


class Moving(GPT2):
    def forward(self, *inputs: Any) -> Tensor:
        if self.training:
            weight = next(self.parameters())
            with torch.no_grad():
                weight[0].mul_(0.99)
        return super().forward(*inputs)
