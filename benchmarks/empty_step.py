"""What does the loop of dtrain/train.py itself take? A strategy whose step does nothing, and clocks around the parts.

overhead.py launches it. The first step is a real one; later ones spin for 2 ms, as a host that waits for its GPU does,
and give that step's result back. Meanwhile the next batch is read and the vote travels, as they do in training. What
lies between two steps is the loop: it takes the batch, votes, seeds, sets the learning rate, writes metrics. Besides
the wall time there is the CPU time of the main thread, which other load on the machine hardly touches.
"""

from __future__ import annotations

import json
import os
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch import Tensor

from dtrain import metrics, saving, worker
from dtrain.data.loader import Loader
from dtrain.strategies.ddp import DDP

WARM_UP = 100  # steps that are not counted
STEP_S = 0.002
Times = tuple[float, float]  # wall and CPU seconds
# what is timed: of whom, which call, and the part of the loop that it belongs to
PARTS: list[tuple[Any, str, str]] = [
    (Loader, "batch", "data"),
    (worker.StopRequest, "start_vote", "vote, begun"),
    (worker.StopRequest, "read_vote", "vote, read"),
    (worker, "seed_everything", "seeds"),
    (metrics.Recorder, "write", "metrics, written"),
    (metrics, "memory_gib", "memory, read"),
    (saving.Saver, "finished", "saves, asked for"),
]


class EmptyStep(DDP):
    """strategy=ddp for one step, then nothing; at the end it leaves the medians in a file."""

    def __init__(self, report: str, dp: int = -1, bucket_mb: int = 25) -> None:
        super().__init__(dp=dp, bucket_mb=bucket_mb)
        self.report = Path(report)
        self.result: Any = None
        self.ended: Times = (0.0, 0.0)
        self.spent: dict[str, Times] = {}
        self.steps: list[dict[str, Times]] = []

    def setup(self, *args: Any, **options: Any) -> None:
        super().setup(*args, **options)
        for owner, name, part in PARTS:
            setattr(owner, name, self.clocked(getattr(owner, name), part))

    def clocked(self, call: Callable[..., Any], part: str) -> Callable[..., Any]:
        def timed(*args: Any, **options: Any) -> Any:
            began = clocks()
            try:
                return call(*args, **options)
            finally:
                self.spent[part] = since(began)

        return timed

    def set_lr(self, share: float) -> float:
        began = clocks()
        lr = super().set_lr(share)
        self.spent["learning rate"] = since(began)
        return lr

    def train_step(self, inputs: Tensor, targets: Tensor) -> Any:
        whole = since(self.ended)
        if self.result is None:
            self.result = super().train_step(inputs, targets)
        self.steps.append({**self.spent, "whole": whole})
        self.spent.clear()
        until = time.perf_counter() + STEP_S
        while time.perf_counter() < until:
            time.sleep(0)  # lets the thread that reads ahead run
        self.ended = clocks()
        return self.result

    def close(self) -> None:
        super().close()
        if os.environ["RANK"] == "0":
            counted = self.steps[WARM_UP:]
            parts = dict.fromkeys(part for step in counted for part in step)
            found = {
                part: [statistics.median(step.get(part, (0.0, 0.0))[i] for step in counted) for i in (0, 1)]
                for part in parts
            }
            self.report.write_text(json.dumps(found))


def clocks() -> Times:
    return time.perf_counter(), time.thread_time()


def since(began: Times) -> Times:
    wall, cpu = clocks()
    return wall - began[0], cpu - began[1]
