"""`dtrain verify mutants=all` and `clean=20`: does verify catch bugs that were published, and nothing else?

Each mutant (mutants.py) trains a few steps under one row of `dtrain verify`, with the bug in its ranks. It is judged as
any row: it must fail, and name what differs. Clean configurations, drawn at random, must pass.
"""

from __future__ import annotations

import json
import os
import random
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from dtrain.commands.verify import compare
from dtrain.commands.verify.compare import Case
from dtrain.commands.verify.mutants import Mutant
from dtrain.config.files import options_of
from dtrain.ui import console

Plan = Callable[[str, int, str, Sequence[str], Path], tuple[Case, Case, str]]  # row, ranks, precision, settings
Judge = Callable[[Case, Case, str], tuple[bool, str, str]]  # passed, reason, named

STEPS = "train.stop_after=4"  # enough for a resume in the middle, and for a second epoch of 24 samples


# the same small sizes as the other model has
LLAMA = (
    "model=llama-tiny", "model.num_heads=4", "model.num_kv_heads=2", "model.hidden_dim=48", "model.vocab_size=61",
    "model.vocab_multiple=16", "model.seq_len=16", "data=synthetic",
)  # fmt: skip
OTHER_MATHS = ("local_sgd", "diloco")


@dataclass(frozen=True)
class Outcome:
    """A row of the table. `right`: a mutant was caught and something was named, a clean run passed."""

    name: str
    what: str
    source: str
    row: str
    right: bool
    named: str
    how: str  # it was caught
    seconds: float


class Refused(ValueError):
    """This machine or these sizes do not suit the configuration."""


class Runs:
    """Runs cases, and each reference once."""

    def __init__(self, folder: Path, timeout: float, plan: Plan, judge: Judge) -> None:
        self.folder, self.timeout, self.plan, self.judge = folder, timeout, plan, judge
        self.references: dict[str, tuple[Case, str]] = {}
        self.env = {"OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1")}

    def reference(self, one: Case, key: str) -> tuple[Case, str]:
        if key not in self.references:
            self.references[key] = one, compare.run(one, self.timeout, self.env)
        return self.references[key]

    def run(
        self, name: str, row: str, size: int, precision: str, settings: Sequence[str], mutant: str = ""
    ) -> tuple[bool, str, str]:
        """Return whether it passed, the reason if not, and what was named."""
        case, one, key = self.plan(row, size, precision, settings, self.folder / f"of-{name}")
        if case.refused:
            raise Refused(f"{name}: {case.refused}")
        shared = [s for s in settings if not s.startswith("strategy.")]
        one, problem = self.reference(one, " ".join([key, *shared]))
        if problem:
            raise ValueError(f"{name}: the reference run: {problem}\n  fix: dtrain verify strategies=ddp --keep DIR")
        begins_with = case.begins_with and one.run_dir / "checkpoints" / case.begins_with.name
        case = replace(case, run_dir=self.folder / name, mutant=mutant, begins_with=begins_with)
        case.config["run_dir"] = str(case.run_dir)
        return self.judge(case, one, compare.run(case, self.timeout, self.env))


def of_mutants(mutants: Sequence[Mutant], runs: Runs) -> Iterator[Outcome]:
    for m in mutants:
        start = time.monotonic()
        passed, how, named = runs.run(f"mutant-{m.name}", m.row, m.size, m.precision, [STEPS, *m.settings], m.name)
        seconds = round(time.monotonic() - start, 1)
        yield Outcome(m.name, m.what, m.source, m.row, not passed and bool(named), named, how, seconds)


def of_clean(number: int, runs: Runs, seed: int = 0) -> Iterator[Outcome]:
    """Draw a model, data and an optimizer for every four layouts."""
    draw = random.Random(seed)
    settings: list[str] = []
    for i in range(number):
        if i % 4 == 0:
            settings = draw_settings(draw)
        start = time.monotonic()
        while True:
            row, size = draw_layout(draw)
            try:
                passed, how, _ = runs.run(f"clean-{i}", row, size, "fp32", settings)
                break
            except Refused:  # a package is missing: draw again
                continue
        text = " ".join([f"processes={size}", *settings[1:]])
        yield Outcome(f"clean-{i}", text, "", row, passed, "", how, round(time.monotonic() - start, 1))


def draw_settings(draw: random.Random) -> list[str]:
    model = draw.choice([(), LLAMA])
    return [
        STEPS, f"train.seed={draw.randrange(1000)}", f"model.num_layers={draw.choice([4, 6])}",
        f"model.dim={draw.choice([16, 32, 48])}", f"train.global_batch_size={draw.choice([8, 16])}",
        f"train.max_grad_norm={draw.choice(['0.5', '1.0', 'null'])}", *model,
        *draw.choice([(), ("data=synthetic", "data.uneven=true")]),
        *draw.choice([(), ("optim=lion", "optim.lr=1e-3"), ("optim=rmsprop", "optim.lr=1e-3")]),
    ]  # fmt: skip


def draw_layout(draw: random.Random) -> tuple[str, int]:
    names = [name for name in options_of("strategy") if name not in OTHER_MATHS]
    name = draw.choice(names)
    sizes = [4] if name == "3d" else [2, 4]
    return name + draw.choice(["", "", "+resume"]), draw.choice(sizes)


# ---- the table -------------------------------------------------------------------------------------------------------


def show(outcomes: Iterator[Outcome], number: int, what: str, as_json: bool) -> bool:
    """Print each outcome as it arrives; return whether all were right."""
    from rich.console import Console

    out = Console(stderr=True) if as_json else console.stdout_console()
    done, start = [], time.monotonic()
    for outcome in outcomes:
        done.append(outcome)
        good = ("killed" if outcome.source else "pass") if outcome.right else ("SURVIVED" if outcome.source else "FAIL")
        head = f"{good:<9} {outcome.name:<28} {outcome.row:<18} {outcome.seconds:>6.1f} s  "
        tail = f"{outcome.named}: {outcome.how}" if outcome.source and outcome.how else outcome.what
        console.say(out, (head, "" if outcome.right else "red"), tail if outcome.right else f"{tail} {outcome.how}")
    right = sum(outcome.right for outcome in done)
    console.say(out, f"{right} of {number} {what} in {time.monotonic() - start:.0f} s")
    if as_json:
        print(json.dumps([asdict(outcome) for outcome in done], indent=1))
        sys.stdout.flush()
    return right == number
