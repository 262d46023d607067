"""What does a slow worker cost under each mode of strategy=ps, and what does ps cost against ddp?

    python benchmarks/parameter_server.py [--rounds 3] [--parts slow_worker against_ddp] [--json FILE]

First: 4 ranks, each pass of which sleeps for PASS_S beside a very small model, so that the ranks of one machine do not
compete for its cores; the same without a slow worker and with one that takes 5 times as long. Four workers of which one
does a fifth have 0.8 of the speed, and a little more if messages take time, which are not slowed. `kept`: of the
samples/s between the second and the last step; `kept_with_drain`: until everything that was computed is in the weights,
as before a save, and this run is short.

Second: real computation on this machine, without a slow worker: the step time beside ddp's, and the bytes that a rank
sends, as the kernel counts them on the loopback interface.

The runs of the first part are at the same time, since they sleep, and so meet the same noise; those of the second take
turns. Ratios are of one round, and their median over the rounds is kept.

It runs in a network namespace of its own, if `unshare` and `ip` can make one: then nobody else's bytes are counted.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import os
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from torch import Tensor

from dtrain.commands.verify import compare
from dtrain.commands.verify.compare import Case
from dtrain.commands.verify.world import World, failure, train_rank
from dtrain.config.build import TRUST
from dtrain.config.run_file import save
from dtrain.models.gpt2 import GPT2

PASS_S, STEPS, RANKS, SLOW = 1.0, 24, 4, 5
MODES = {
    "sync": ["strategy.mode=sync"],
    "bounded, staleness 4": ["strategy.mode=bounded", "strategy.staleness=4"],
    "bounded, staleness 16": ["strategy.mode=bounded", "strategy.staleness=16"],
    "async": ["strategy.mode=async"],
}
SLEEPS = [*compare.SMALL, "model._target_=benchmarks.parameter_server.Sleeping", "trust=[benchmarks]"]
SLEEPS += ["model.num_layers=1", "train.micro_batch_size=1", "train.eval_batches=1", f"train.steps={STEPS}"]
REAL = ["model.num_layers=8", "model.dim=256", "model.num_heads=4", "model.vocab_size=256", "model.seq_len=64"]
REAL += ["data=synthetic", "train.eval_batches=0", "checkpoint.every=0", "train.global_batch_size=8"]
REAL += ["schedule.warmup_steps=0", "train.micro_batch_size=2"]
INSIDE = "DTRAIN_OWN_NETWORK"


class Sleeping(GPT2):
    """A training pass takes a fixed time without a core, as on an accelerator of its own."""

    def forward(self, inputs: Tensor, targets: Tensor | None = None) -> Tensor:
        if self.training:
            time.sleep(PASS_S)
        return super().forward(inputs, targets)


def sent() -> int:
    """Bytes that the loopback interface has sent so far."""
    line = next(x for x in Path("/proc/net/dev").read_text().splitlines() if x.strip().startswith("lo:"))
    return int(line.split(":")[1].split()[8])


@contextlib.contextmanager
def started(folder: Path, strategy: str, *overrides: str) -> Iterator[tuple[Case, World]]:
    cfg = compare.compose([*overrides, f"strategy={strategy}"])
    case = compare.make_case(strategy, RANKS, "fp32", cfg, folder)
    if case.refused:
        raise ValueError(case.refused)
    (folder / "logs").mkdir(parents=True)
    save(folder, case.config)
    with World(RANKS, train_rank, folder, env={TRUST: ",".join(case.config["trust"])}) as world:
        yield case, world


def ended(case: Case, world: World) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Wait for a run: the lines of metrics.jsonl, and the summary."""
    problem = failure(case.run_dir, world.join(1200))
    if problem:
        raise RuntimeError(problem)
    lines = [json.loads(line) for line in (case.run_dir / "metrics.jsonl").read_text().splitlines()]
    return lines, json.loads((case.run_dir / "summary.json").read_text())


def run(strategy: str, *overrides: str) -> tuple[list[dict[str, Any]], dict[str, Any], int]:
    """Train alone: lines, summary, and the bytes sent by all ranks."""
    with tempfile.TemporaryDirectory() as folder:
        before = sent()
        with started(Path(folder) / "run", strategy, *overrides) as (case, world):
            lines, summary = ended(case, world)
        return lines, summary, sent() - before


def samples_per_s(lines: list[dict[str, Any]], drained: bool = False) -> float:
    """From when all pieces of step 2 were taken until those of the last step were; `drained`: and were applied."""
    began = next(line["time"] for line in lines if line["step"] == 2)
    ended = next(
        line["time"] for line in lines if ("val_loss" if drained else "loss") in line and line["step"] == STEPS
    )
    return float((STEPS - 2) * 8 / (ended - began))


def with_a_slow_worker(rounds: int) -> list[dict[str, Any]]:
    found: dict[str, list[dict[str, Any]]] = {mode: [] for mode in MODES}
    slow = ["strategy.slow_rank=3", f"strategy.slow_factor={SLOW}"]
    for _ in range(rounds):
        with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
            pairs = {
                mode: [
                    stack.enter_context(started(Path(folder) / f"{mode}-{i}", "ps", *SLEEPS, *overrides, *more))
                    for i, more in enumerate(([], slow))
                ]
                for mode, overrides in MODES.items()
            }
            for mode, pair in pairs.items():
                (plain, _), (slowed, summary) = (ended(*one) for one in pair)
                rates, drained = ([samples_per_s(one, end) for one in (plain, slowed)] for end in (False, True))
                kept = {"kept": rates[1] / rates[0], "kept_drained": drained[1] / drained[0]}
                found[mode].append({"rates": rates, **kept, "ps": summary.get("ps")})
                print(mode, found[mode][-1], flush=True)
    return slow_rows(found)


def slow_rows(found: dict[str, list[dict[str, Any]]]) -> list[dict[str, Any]]:
    return [
        {
            "mode": mode,
            "samples_per_s": round(statistics.median(r["rates"][0] for r in each), 2),
            "samples_per_s_slow": round(statistics.median(r["rates"][1] for r in each), 2),
            "kept": round(statistics.median(r["kept"] for r in each), 3),
            "kept_with_drain": round(statistics.median(r["kept_drained"] for r in each), 3),
            "kept_each_round": [round(r["kept"], 3) for r in each],
            "largest_staleness": max(r["ps"]["largest_staleness"] for r in each) if each[0]["ps"] else 0,
            "pieces_of_the_ranks": each[-1]["ps"]["pieces"] if each[0]["ps"] else None,
        }
        for mode, each in found.items()
    ]


def against_ddp(rounds: int) -> list[dict[str, Any]]:
    kinds = {"ddp": ("ddp", []), **{f"ps, {mode}": ("ps", MODES[mode]) for mode in ("sync", "async")}}
    step_s: dict[str, list[float]] = {kind: [] for kind in kinds}
    bytes_sent: dict[str, float] = {}
    for i in range(rounds):
        for kind, (strategy, overrides) in kinds.items():
            lines, summary, long = run(strategy, *REAL, "train.steps=12", *overrides)
            steps = [line for line in lines if "loss" in line][2:]
            step_s[kind].append((steps[-1]["time"] - steps[0]["time"]) / (len(steps) - 1))
            if i == 0:  # a run of 2 steps sends the same at its start and end
                _, _, short = run(strategy, *REAL, "train.steps=2", *overrides)
                bytes_sent[kind] = (long - short) / 10 / RANKS / (4 * summary["parameters"])
            print(kind, step_s[kind][-1], bytes_sent[kind], flush=True)
    return [
        {
            "row": kind,
            "step_s": round(statistics.median(step_s[kind]), 4),
            "times_ddp": round(statistics.median(a / b for a, b in zip(step_s[kind], step_s["ddp"], strict=True)), 2),
            "sent_in_weights": round(bytes_sent[kind], 3),
        }
        for kind in kinds
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--parts", nargs="*", default=["slow_worker", "against_ddp"])
    parser.add_argument("--json", type=Path, help="a part that was not measured stays as it is in this file")
    options = parser.parse_args()
    tools = shutil.which("unshare") and shutil.which("ip")
    if tools and INSIDE not in os.environ:
        os.environ[INSIDE] = "1"
        script = 'ip link set lo up && exec "$@"'
        os.execvp("unshare", ["unshare", "-rn", "sh", "-c", script, "sh", sys.executable, *sys.argv])
    from benchmarks.throughput import environment

    known = json.loads(options.json.read_text()) if options.json and options.json.exists() else {}
    parts = {"slow_worker": with_a_slow_worker, "against_ddp": against_ddp}
    found = {part: parts[part](options.rounds) for part in options.parts}
    for row in itertools.chain(*found.values()):
        print(row)
    if options.json:
        what = f"{RANKS} ranks; slow_worker: a pass sleeps {PASS_S} s, that of the slow one {SLOW} times as long"
        content = {**known, "benchmark": "parameter_server", **environment(), "what": what, **found}
        options.json.write_text(json.dumps(content, indent=1) + "\n")


if __name__ == "__main__":
    main()
