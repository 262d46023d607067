"""Data parallel with an all-reduce to read: a ring of send/recv (comm/ring.py) after the last backward pass.

The maths is ddp's. It is slower: ddp reduces its buckets while the backward pass still runs, and its collectives are
written in C++. `trace` writes each message of the first steps to logs/ring-trace-RANK.jsonl of the run folder.
"""

from __future__ import annotations

import json
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from dtrain.comm import ring
from dtrain.strategies.base import Strategy
from dtrain.util.collective import sendable

TRACE_FILE = "logs/ring-trace-{}.jsonl"


class Ring(Strategy):
    updates_together = True

    def __init__(self, dp: int = -1, trace: int = 0) -> None:
        super().__init__(dp=dp)
        self.trace = trace  # first steps of this process whose messages are written
        self.num_reduced = 0

    def forward_backward(self, inputs: Tensor, targets: Tensor) -> Tensor:
        loss = super().forward_backward(inputs, targets)
        if self.sizes.dp > 1:
            self.average_gradients()
        return loss

    @torch.no_grad()
    def average_gradients(self) -> None:
        """Copy all gradients into one flat tensor, sum it around the ring, and copy the mean back."""
        parameters = [p for p in self.module.parameters() if p.requires_grad]
        for p in parameters:
            if p.grad is None:  # unused on this rank, but all ranks must send the same number of values
                p.grad = torch.zeros_like(p)
        gradients = [p.grad for p in parameters if p.grad is not None]
        flat = sendable(torch.cat([g.flatten() for g in gradients]).div_(self.sizes.dp), self.data_group)
        self.num_reduced += 1
        ring.all_reduce(flat, self.data_group, self.note if self.num_reduced <= self.trace else None)
        for gradient, mean in zip(gradients, flat.split([g.numel() for g in gradients]), strict=True):
            gradient.copy_(mean.view_as(gradient))

    def note(self, message: dict[str, Any]) -> None:
        assert self.folder is not None
        with open(self.folder / TRACE_FILE.format(dist.get_rank()), "a") as file:
            file.write(json.dumps({"step": self.num_reduced, **message}) + "\n")
