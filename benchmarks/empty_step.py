"""What does a loop take between two steps? A step that computes nothing, for ours and for the hand-written one.

overhead.py launches it. The first step is a real one; later ones give its result back after 2 ms of small torch
calls, as a host makes them that queues kernels for its GPU. Meanwhile the next batch is read and a vote travels, as
they do in training. What lies between two steps is the loop: ours takes the batch, votes, seeds, sets the learning
rate, looks at the figures and writes them; the hand-written one takes the batch, sets the learning rate, prints.

Counted is all of that, by the wall and by the CPU time of the main thread, which other load on the machine touches
less. The wall has more in it: the main thread waits for Python's lock while the thread that reads ahead has it, and
that waits for a core where the steps of two processes leave none of two.

Not counted is what would measure the measurement. A step that sleeps, also for 0 s, lets the core go idle, and in a
virtual machine others have its caches then: the same lines of Python took 1.1 to 3 times as long after it, from one
minute to the next. Clocks around a part take about 2 µs, so every second block of 50 steps goes without, and the
whole comes from those. Some work is not done at each step (votes), so what counts is the mean of a block; the figure
is the median of the blocks. Metrics are written at every step, as they are by default.
"""

from __future__ import annotations

import json
import os
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from dtrain.checkpoint import background
from dtrain.data.loader import Loader
from dtrain.runs import recorder
from dtrain.strategies.ddp import DDP
from dtrain.train import metrics, process

BLOCK = 50  # steps
WARM_UP = 4  # blocks that are not counted
STEP_S = 0.002
Times = tuple[float, float]  # wall and CPU seconds
# what is timed: of whom, which call, and the part of the loop that it belongs to
PARTS: list[tuple[Any, str, str]] = [
    (Loader, "batch", "data"),
    (process.StopRequest, "start_vote", "vote, begun"),
    (process.StopRequest, "read_vote", "vote, read"),
    (process, "seed_everything", "seeds"),
    (recorder.Recorder, "write", "metrics, written"),
    (metrics, "memory_gib", "memory, read"),
    (background.Saver, "finished", "saves, asked for"),
    (DDP, "set_lr", "learning rate"),
]


class Empty:
    """A step for one call, then nothing, but it notes what passed since the last call; rank 0 leaves the medians."""

    def __init__(self, step: Callable[..., Any], report: Path) -> None:
        self.step, self.report = step, report
        self.result: Any = None
        self.ended: Times = (0.0, 0.0)
        self.work = torch.zeros(1000)
        self.clocking = False
        self.whole: list[list[Times]] = []  # of blocks without clocks around parts
        self.parts: list[dict[str, Times]] = []  # sums over a block with them
        self.num_steps = 0

    def __call__(self, inputs: Tensor, targets: Tensor) -> Any:
        between = since(self.ended)
        if self.result is None:
            self.result = self.step(inputs, targets)
        elif not self.clocking:
            self.whole[-1].append(between)
        if self.num_steps % BLOCK == 0:
            self.clocking = self.num_steps // BLOCK % 2 == 1
            if self.clocking:
                self.parts.append({})
            else:
                self.whole.append([])
        self.num_steps += 1
        until = time.perf_counter() + STEP_S
        while time.perf_counter() < until:
            self.work.add(1)  # each call lets go of Python's lock: the thread that reads ahead can have it
        self.ended = clocks()
        return self.result

    def clocked(self, call: Callable[..., Any], part: str) -> Callable[..., Any]:
        def timed(*args: Any, **options: Any) -> Any:
            if not self.clocking:
                return call(*args, **options)
            began = clocks()
            try:
                return call(*args, **options)
            finally:
                wall, cpu = since(began)
                before = self.parts[-1].get(part, (0.0, 0.0))
                self.parts[-1][part] = (before[0] + wall, before[1] + cpu)

        return timed

    def write(self) -> None:
        if os.environ["RANK"] != "0":
            return
        whole, parts = self.whole[WARM_UP // 2 : -1], self.parts[WARM_UP // 2 : -1]  # the last may be a part of one
        found = {"whole": [statistics.median(statistics.mean(s[i] for s in block) for block in whole) for i in (0, 1)]}
        for part in dict.fromkeys(part for block in parts for part in block):
            sums = [block.get(part, (0.0, 0.0)) for block in parts]
            found[part] = [statistics.median(s[i] / BLOCK for s in sums) for i in (0, 1)]
        self.report.write_text(json.dumps(found))


class EmptyHook:
    """A hook without any method that the loop calls between steps."""

    def begin(self, run: Any) -> None: ...


class EmptyStep(DDP):
    """strategy=ddp for one step, then nothing."""

    def __init__(
        self,
        report: str,
        dp: int = -1,
        bucket_mb: int = 25,
        compress: Literal["none"] = "none",
        compress_rank: int = 4,
        compress_ratio: float = 0.01,
        compress_warmup: int = 0,
        cp: int = 1,
        cp_kind: Literal["ring", "allgather", "ulysses"] = "ring",
    ) -> None:
        super().__init__(dp, bucket_mb, compress, compress_rank, compress_ratio, compress_warmup, cp, cp_kind)
        self.empty = Empty(super().train_step, Path(report))

    def setup(self, *args: Any, **options: Any) -> None:
        super().setup(*args, **options)
        for owner, name, part in PARTS:
            setattr(owner, name, self.empty.clocked(getattr(owner, name), part))

    def train_step(self, inputs: Tensor, targets: Tensor) -> Any:
        return self.empty(inputs, targets)

    def close(self) -> None:
        super().close()
        self.empty.write()


def clocks() -> Times:
    return time.perf_counter(), time.thread_time()


def since(began: Times) -> Times:
    wall, cpu = clocks()
    return wall - began[0], cpu - began[1]
