"""One rank's run: what the loop and its helpers read and change, from the first step to the summary."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from dtrain.config import run_file
from dtrain.config.mesh import MeshSizes
from dtrain.config.run_file import Settings
from dtrain.data.loader import Loader
from dtrain.data.stream_loader import StreamLoader
from dtrain.runs.best import METRICS
from dtrain.runs.folder import write_json
from dtrain.runs.metrics import OWN, own_names
from dtrain.runs.recorder import Recorder
from dtrain.strategies.base import Strategy
from dtrain.train import metrics
from dtrain.train.best import Best
from dtrain.train.fresh_state import FreshState
from dtrain.train.hooks import Hooks
from dtrain.train.pending import FinishedStep
from dtrain.train.process import log
from dtrain.train.spikes import Spikes
from dtrain.train.startup import StartTimes
from dtrain.util.format import start_text


@dataclass
class Validation:
    """The held-out split, and how much of it an evaluation reads."""

    data: Loader
    batch_size: int
    num_batches: int

    def batches(self, device: torch.device) -> Iterator[tuple[Tensor, Tensor]]:
        """This data rank's share of the batches of an evaluation."""
        for i in range(self.num_batches):
            inputs, targets = self.data.batch(i * self.batch_size)
            yield inputs.to(device, non_blocking=True), targets.to(device, non_blocking=True)


@dataclass
class Run:
    """One rank's run. `step` and `samples` are its position; `spikes`, `summary` and the last fields change, too."""

    folder: Path
    cfg: Settings
    device: torch.device
    model: nn.Module
    strategy: Strategy
    schedule: Callable[[int], float]
    mesh: MeshSizes
    train_data: Loader | StreamLoader
    validation: Validation | None
    data_identity: str
    rate: metrics.Rate
    recorder: Recorder | None  # on rank 0
    summary: dict[str, Any]
    last_step: int
    step: int
    samples: int
    spikes: Spikes
    hooks: Hooks
    loaded_from: Path | None
    began: float
    best: Best
    fresh: FreshState
    classes: list[str]
    times: StartTimes
    num_skipped: int = 0
    step_times: list[float] = field(default_factory=list)
    recent: list[FinishedStep] = field(default_factory=list)  # the newest two, for train/rescue.py
    evaluated: tuple[int, dict[str, float]] = (0, {})  # the newest evaluation: its step and metrics
    exposed_comm_s: float | None = None  # of a step, mean of the newest window (stragglers.py)

    def step_metrics(self, finished: FinishedStep) -> dict[str, Any]:
        """A step's line in metrics.jsonl."""
        rate, step_s = self.rate, finished.step_s
        exposed = {} if self.exposed_comm_s is None else {"exposed_comm_s": round(self.exposed_comm_s, 6)}
        return {
            "step": finished.step, "loss": finished.loss, "lr": finished.lr, "grad_norm": finished.grad_norm,
            "tokens": finished.samples * rate.tokens_per_sample, "tokens_per_s": rate.tokens_per_s(step_s),
            "step_s": step_s, "data_s": finished.data_s, "mfu": rate.mfu(step_s),
            "mem_gib": metrics.memory_gib(self.device), **exposed, **self.hooks.train_metrics(finished.step),
        }  # fmt: skip

    def note_start(self, first: FinishedStep) -> None:
        """After the first step: put the seconds of each phase of the start into the summary, and log them."""
        self.summary["start_s"] = self.times.first_step(first)
        if self.strategy.unused:
            self.summary["unused"] = self.strategy.unused
        if self.recorder:
            write_json(self.folder / "summary.json", self.summary)
            log.info("%s", start_text(self.summary["start_s"]))

    def record(self, found: dict[str, float]) -> None:
        """Put the metrics of an evaluation, or of a hook, into the summary and on a line of their own."""
        own = own_names(found)
        self.summary |= found
        if own:
            self.summary["own_metrics"] = sorted({*self.summary.get("own_metrics", ()), *own})
        if self.recorder:
            self.recorder.write(step=self.step, **found, **({OWN: own} if own else {}))

    def checkpoint_meta(self, alone: bool = False) -> dict[str, Any]:
        """What a checkpoint says about the run, besides the strategy's state. alone: without the other ranks."""
        of_hooks, cursor = self.hooks.state(alone), self.train_data.cursor_at(self.samples)
        step, found = self.evaluated
        finite = {name: value for name, value in found.items() if step == self.step and math.isfinite(value)}
        return {
            "samples": self.samples, "data": self.data_identity, "mesh": self.mesh.as_dict(),
            "world_size": dist.get_world_size(), "choices": dict(self.cfg.choices),
            "config_sha256": run_file.fingerprint(self.folder), "spikes": self.spikes.state(), METRICS: finite,
            **({"hooks": of_hooks} if of_hooks else {}), **({"classes": self.classes} if self.classes else {}),
            **({"stream": cursor} if cursor else {}), **getattr(self.model, "_own_names", {}),
        }  # fmt: skip
