"""Inside a peer's process: batches for its loop, and the gate that holds the loop between two blocks of steps."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Iterator
from typing import Any

import torch
from torch.utils.data import IterableDataset

GIB = 2**30


class Feed(IterableDataset):  # type: ignore[type-arg]
    """The same few batches for ever, already on the device.

    Whoever asks for the next batch is between two steps, under any tool, so that is where the loop is held and timed.
    A tool that fetches one batch ahead has done one step less at each gate, so between two gates there are always as
    many steps as batches. A block has `untimed` steps, in which memory that was handed back is taken again, and then
    `timed` ones from a synchronisation to a synchronisation. The first block, in which things are compiled, begins
    unasked.
    """

    def __init__(self, batches: list[Any], device: torch.device) -> None:
        self.batches, self.device = batches, device
        self.out = os.fdopen(os.dup(1), "w")  # to the benchmark; what tools print goes to the log
        os.dup2(2, 1)
        self.given = self.count = 0
        self.due, self.untimed, self.timed = 0, 2, 3
        self.began: float | None = None
        self.loss: Any = None  # of the last step, however a tool keeps it

    def __iter__(self) -> Iterator[Any]:
        while True:
            self.gate()
            self.given += 1
            yield self.batches[self.given % len(self.batches)]

    def gate(self) -> None:
        if self.given < self.due:
            return
        self.synchronize()
        if self.due == 0:  # before the first step of all
            self.due = self.untimed
        elif self.began is None:  # the untimed steps are over
            self.due += self.timed
            if self.device.type == "cuda":
                torch.cuda.reset_peak_memory_stats()
            self.began = time.perf_counter()
        else:
            seconds = time.perf_counter() - self.began
            if self.device.type == "cuda":
                torch.cuda.empty_cache()  # before the report: who is next may need what only a step needs
            self.report(seconds)
            self.wait()

    def report(self, seconds: float) -> None:
        from dtrain.train.metrics import memory_gib

        done = self.loss.read() if hasattr(self.loss, "read") else self.loss  # ours is a result that may be on the GPU
        loss = getattr(done, "loss", done)
        held = torch.cuda.memory_reserved() / 2**30 if self.device.type == "cuda" else 0.0  # as a recorded step does
        found = {"seconds": seconds, "steps": self.timed, "peak_gib": max(memory_gib(self.device) or 0.0, held)}
        self.out.write(json.dumps(found | {"loss": None if loss is None else float(loss)}) + "\n")
        self.out.flush()

    def wait(self) -> None:
        """Go on when told, with so many steps."""
        words = sys.stdin.readline().split()
        if not words:  # the benchmark has ended, or wants this peer no more
            os._exit(0)
        self.untimed, self.timed = map(int, words)
        self.due, self.began = self.due + self.untimed, None

    def synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize()
