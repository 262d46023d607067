"""topk: of each parameter, the few largest values and where they are, from every rank to every other."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from dtrain.comm.compressor import Compressor, Gradients


def num_kept(numel: int, ratio: float) -> int:
    return max(1, round(numel * ratio))


class TopK(Compressor):
    """Each rank chooses its own values, so an all-gather sends them: (n - 1) × 8 bytes for each that is kept."""

    def __init__(self, ratio: float, *arguments: Any) -> None:
        self.ratio = ratio
        super().__init__(*arguments)

    def exchange(self, gradients: Gradients) -> None:
        chosen, counts = [], []
        for name, gradient in gradients.items():
            owed = self.owed(name, gradient).reshape(-1)
            counts.append(num_kept(owed.numel(), self.ratio))
            places = owed.abs().topk(counts[-1], sorted=False).indices
            chosen.append(torch.stack([places.to(torch.int32).view(torch.float32), owed[places]]))
            owed[places] = 0
            self.keep(name, "error", owed)
        sent = torch.cat(chosen, dim=1)
        received = sent.new_empty(self.num_ranks, *sent.shape)
        dist.all_gather(list(received.unbind()), sent, group=self.group)
        for gradient, part in zip(gradients.values(), received.split(counts, dim=2), strict=True):
            mean = torch.zeros(gradient.numel(), device=gradient.device)
            for indices, values in part.unbind():  # rank by rank: a fixed order of the sum
                mean[indices.contiguous().view(torch.int32).long()] += values / self.num_ranks
            gradient.copy_(mean.view(gradient.shape))
