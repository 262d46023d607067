"""Elastic runs under test: a launched run whose ranks leave, are killed and join, and what its samples and losses were.

The run's own data has the sample's number in its first three tokens, and its own model logs which samples it saw in
which step, so that "every sample exactly once" is read from what was trained on.
"""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from dtrain.data.loader import permutation
from dtrain.launch import members
from tests.patience import until
from tests.world import ROOT, SMALL, losses, metrics, summary

SAMPLES, BATCH, VOCABULARY = 10_000, 12, 61
OWN = """
import os, time
from dtrain.data.synthetic import Synthetic
from dtrain.models.gpt2 import GPT2

STEP = []

class Numbered:
    def __init__(self, dataset):
        self.dataset = dataset

    def __len__(self):
        return len(self.dataset)

    def batch(self, indices):
        inputs, targets = self.dataset.batch(indices)
        for row, index in zip(inputs, indices.tolist()):
            row[0], row[1], row[2] = index // 3721, index // 61 % 61, index % 61
        return inputs, targets

class Data(Synthetic):
    def dataset(self, split):
        return Numbered(super().dataset(split))

class Logged(GPT2):
    def forward(self, inputs, targets=None):
        if STEP and self.training:
            ids = inputs[:, 0] * 3721 + inputs[:, 1] * 61 + inputs[:, 2]
            numbers = " ".join(map(str, ids.tolist()))
            with open(f"{os.environ['IDS']}/{os.environ['MASTER_PORT']}", "a") as file:
                file.write(f"{time.time()} {STEP[0]} {os.environ['RANK']} {numbers}\\n")
            time.sleep(1.0 if os.path.exists("slow") else float(os.environ["PAUSE"]))
        return super().forward(inputs, targets)

def schedule(step: int, steps: int, warmup_steps: int = 5) -> float:
    STEP[:] = [step]
    return min(1.0, (step + 1) / (warmup_steps + 1))
"""
OVERRIDES = [
    *SMALL, "train.eval_batches=0", f"train.global_batch_size={BATCH}", "model._target_=own.Logged", "trust=[own]",
    "model.dim=48", "model.num_heads=12", "model.vocab_multiple=12",  # tensor parallel over 1, 2, 3 or 4 ranks
    "optim.lr=3e-4",  # at 3e-3, rounding grows: undisturbed runs of 1 and 4 ranks differ by 5e-4 after 600 steps
    "data=own.Data", "data.seq_len=16", f"data.vocab_size={VOCABULARY}", "schedule=own.schedule",
]  # fmt: skip


@dataclass
class Generation:
    """The steps between two changes of ranks, from what its ranks logged."""

    first: int  # steps, counted from 0
    last: int
    began: float
    stepped: float  # when its first step was over: its second one began
    ranks: int
    samples: dict[int, Counter[int]]


class ElasticRun:
    """A launched run with its own code, in a folder of its own."""

    def __init__(self, folder: Path, *overrides: str, pause: float = 0.0, env: dict[str, str] | None = None) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "own.py").write_text(OWN)
        (folder / "ids").mkdir()
        self.folder, self.run_dir = folder, folder / "run"
        command = [sys.executable, str(ROOT / "launch.py"), *OVERRIDES, "run_dir=run", *overrides]
        env = os.environ | {"OMP_NUM_THREADS": "1", "IDS": str(folder / "ids"), "PAUSE": str(pause)} | (env or {})
        with open(folder / "screen", "w") as screen:
            self.process = subprocess.Popen(command, cwd=folder, env=env, stdout=screen, stderr=subprocess.STDOUT)

    @property
    def screen(self) -> str:
        return (self.folder / "screen").read_text()

    @property
    def step(self) -> int:
        lines = metrics(self.run_dir)
        return int(lines[-1]["step"]) if lines else 0

    @property
    def num_ranks(self) -> int:
        return int(summary(self.run_dir)["world_size"]) if (self.run_dir / "summary.json").exists() else 0

    def wait_for_step(self, step: int) -> None:
        def reached() -> bool:
            assert self.process.poll() is None, self.screen
            return self.step >= step

        until(reached, f"step {step}", 60, lambda: self.screen)

    def signal(self, rank: int, number: signal.Signals) -> None:
        os.kill(process_of(self.run_dir, rank), number)

    def scale(self, number: int) -> None:
        members.request(self.run_dir, number)

    def join(self, seconds: float = 300) -> int:
        until(lambda: self.process.poll() is not None, "the end of the run", seconds, lambda: self.screen)
        return int(self.process.returncode)

    def kill(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()

    def generations(self) -> list[Generation]:
        return generations(self.folder / "ids")


def process_of(run_dir: Path, rank: int) -> int:
    """The rank's process: its log begins with it, in every generation."""
    lines = (run_dir / "logs" / f"rank-{rank}.log").read_text().splitlines()
    return next(int(line.split()[6]) for line in reversed(lines) if " INFO rank " in line and ", process " in line)


def generations(folder: Path) -> list[Generation]:
    """All generations that trained, in order."""
    return sorted((read(path) for path in folder.iterdir() if path.stat().st_size), key=lambda g: g.began)


def read(path: Path) -> Generation:
    """One generation: times, steps and samples. Tensor-parallel ranks see the same samples; they count once."""
    samples: dict[int, Counter[int]] = {}
    begins: dict[int, float] = {}
    ranks = set()
    for line in path.read_text().splitlines():
        when, step, rank, *ids = line.split()
        samples.setdefault(int(step), Counter()).update(map(int, ids))
        begins.setdefault(int(step), float(when))
        ranks.add(rank)
    for counts in samples.values():
        times = min(counts.values())
        for index in counts:
            counts[index] //= times
    first, last = min(samples), max(samples)
    return Generation(first, last, begins[first], begins.get(first + 1, begins[last]), len(ranks), samples)


def check_samples(generations: list[Generation], steps: int) -> int:
    """Check that the last pass over each step had exactly its samples; return the number of distinct samples."""
    order, seen = permutation(0, 0, SAMPLES), Counter[int]()
    for step in range(steps):
        last = [generation for generation in generations if step in generation.samples][-1]
        expected = Counter(order[step * BATCH : (step + 1) * BATCH].tolist())
        assert last.samples[step] == expected, (step, last.samples[step] - expected, expected - last.samples[step])
        seen += last.samples[step]
    assert set(seen.values()) == {1}
    return len(seen)


def apart(run_dir: Path, other: Path) -> float:
    """The largest difference between two loss curves of the same steps."""
    one, two = losses(run_dir), losses(other)
    assert one.keys() == two.keys(), sorted(one.keys() ^ two.keys())
    return max(abs(one[step] - two[step]) for step in one)


# ---- random events -----------------------------------------------------------------------------------------------


@dataclass
class Event:
    kind: str
    step: int  # that the run had made
    ranks: int  # before
    rank: int | None = None
    wanted: int | None = None
    lost_steps: int | None = None
    back_s: float | None = None  # until the first step of the next generation was over
    at: float = 0.0


def draw_event(draw: random.Random, ranks: int, usable: list[int]) -> Event:
    """A leave or a kill of a random rank, or a join: one that can happen with this number of ranks."""
    kinds = [] if ranks == usable[0] else ["leave", "kill", "kill-rank-0"]
    kinds += [] if ranks == usable[-1] else ["join"] * max(1, len(kinds))
    kind = draw.choice(kinds)
    if kind == "join":
        return Event(kind, 0, ranks, wanted=draw.choice([n for n in usable if n > ranks]))
    return Event(kind.removesuffix("-rank-0"), 0, ranks, rank=0 if kind == "kill-rank-0" else draw.randrange(ranks))


def disturb(run: ElasticRun, count: int, steps: int, usable: list[int], draw: random.Random) -> list[Event]:
    """Let `count` random events happen over the steps of a run, each after the one before it was dealt with.

    None in the last 30 steps: up to 10 steps lie between two votes on a stop, and the run would end first.
    """
    at = sorted(draw.sample(range(3, steps - 30), count))
    events: list[Event] = []
    for step in at:
        run.wait_for_step(max(step, run.generations()[-1].first + 3 if events else 3))
        seen = len(run.generations())
        event = draw_event(draw, run.num_ranks, usable)
        event.step, event.at = run.step, time.time()
        if event.wanted:
            run.scale(event.wanted)
        elif event.rank is not None:
            run.signal(event.rank, signal.SIGTERM if event.kind == "leave" else signal.SIGKILL)
        events.append(event)
        until(
            lambda seen=seen: run.process.poll() is not None or len(run.generations()) > seen,
            f"the generation after {event}", 120, lambda: run.screen,
        )  # fmt: skip
    return events


def assess(events: list[Event], generations: list[Generation]) -> list[dict[str, Any]]:
    """What each event cost: the steps that were trained again, and the time until the next step was over."""
    assert len(generations) == len(events) + 1, (len(generations), len(events))
    for event, before, after in zip(events, generations[:-1], generations[1:], strict=True):
        # a step that a kill interrupted was not made, so it is not lost
        made = before.last + 1 if event.kind != "kill" else before.last
        event.lost_steps, event.back_s = max(0, made - after.first), after.stepped - event.at
    return [asdict(event) for event in events]


def attempts(run_dir: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run_dir / "attempts.jsonl").read_text().splitlines()]
