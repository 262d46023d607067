"""Parts that models share. Norms and the residual stream are float32 in every precision; head and loss are one call."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

IGNORED = -100  # a target that does not count: padding, or a token that is not asked for


class LayerNorm(nn.LayerNorm):
    """In float32 in every precision, also where fsdp has gathered 16-bit weights; in fp32 the casts do nothing."""

    def forward(self, x: Tensor) -> Tensor:
        return F.layer_norm(x.float(), self.normalized_shape, self.weight.float(), self.bias.float(), self.eps)


class Head(nn.Module):
    """Logits, or the mean loss, from the last hidden states and a matrix. A module, so that a plan can name it."""

    def forward(self, x: Tensor, weight: Tensor, targets: Tensor | None = None) -> Tensor:
        logits = F.linear(x, weight)
        return logits if targets is None else F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())


FIGURES = ("accuracy", "top5")  # what `classify` gives after the loss


def classify(logits: Tensor, targets: Tensor, training: bool) -> Tensor:
    """The mean loss over the targets that count; in evaluation also the shares that are right, and among the best 5.

    `logits` has one dimension more than `targets`.
    """
    logits, targets = logits.reshape(-1, logits.shape[-1]).float(), targets.reshape(-1)
    loss = F.cross_entropy(logits, targets)
    if training:
        return loss
    best = logits.topk(min(5, logits.shape[-1])).indices == targets[:, None]  # an ignored target equals no class
    count = (targets != IGNORED).sum()
    return torch.stack([loss, best[:, 0].sum() / count, best.any(dim=1).sum() / count])
