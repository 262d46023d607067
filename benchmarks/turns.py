"""Is one way to train faster than another? Both in one process, a block of steps in turn.

    python benchmarks/turns.py [overrides of all] -- [of one] -- [of another] ... [--rounds 9] [--json FILE]
    python benchmarks/turns.py model=gpt2-124m train.global_batch_size=32 -- -- without=products -- compile=blocks

`without=products` leaves products to torch's own choice of kernel, `without=gelu` GELU's backward pass to the compiler,
`documents=N` packs documents of N tokens on average.
Ratios are to the first way, of the same round: what comes and goes on the machine hits both. The GPU's power and clock
(nvidia-smi, every 50 ms) stand beside each way. Batches are random numbers on the device, as in measure.py.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any
from unittest.mock import patch

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks"), str(ROOT / "benchmarks" / "planner")]
COMMON = ["strategy=ddp", "precision=bf16", "cluster.nodes=1", "cluster.processes=1"]
BLOCK_S, UNTIMED = 0.8, 2  # of a block: seconds, and steps before them
ASKED = "power.draw.instant,clocks.sm,clocks_event_reasons.sw_power_cap"


def without(names: list[str]) -> contextlib.ExitStack:
    """The parts of dtrain that a way does without, switched off for as long as this is open."""
    from dtrain.kernels import cublaslt
    from dtrain.models import layers

    stack = contextlib.ExitStack()
    if "products" in names:
        stack.enter_context(patch.object(cublaslt, "library", lambda: None))
    if "gelu" in names:
        stack.enter_context(patch.object(layers.MLP, "fuses", False))
    return stack


def packed(batch: tuple[Any, Any], mean: int) -> tuple[Any, Any]:
    """The batch as packed documents of `mean` tokens on average, cut at random."""
    import torch

    tokens, targets = batch
    starts = torch.rand(tokens.shape, device=tokens.device) < 1 / mean
    starts[:, 0] = True
    places = torch.arange(tokens.shape[1], device=tokens.device).expand_as(tokens)
    return torch.stack([tokens, places - torch.where(starts, places, 0).cummax(dim=1).values], dim=-1), targets


class Way:
    """A strategy that is set up, and its steps."""

    def __init__(self, overrides: list[str], device: Any) -> None:
        from measure import batch_of

        from benchmarks.peer.loops import set_up
        from dtrain.config.run_file import Settings
        from dtrain.launch.compose import compose

        own = ("without=", "documents=")
        self.missing = [override.partition("=")[2] for override in overrides if override.startswith("without=")]
        mean = [int(override.partition("=")[2]) for override in overrides if override.startswith("documents=")]
        cfg = Settings(compose([override for override in overrides if not override.startswith(own)]))
        size = cfg.train.global_batch_size
        self.batches = [batch_of(cfg, size, device) for _ in range(4)]
        self.batches = [packed(batch, mean[0]) if mean else batch for batch in self.batches]
        self.taken, self.last, self.steps_s, self.samples = 0, None, [], []  # type: ignore[var-annotated]
        with without(self.missing):
            self.strategy = set_up(cfg, size, device)

    def run(self, steps: int) -> float:
        """Seconds of one step; a step's figures are read while the next one computes, as in the loop."""
        began = time.perf_counter()
        with without(self.missing):
            for _ in range(steps):
                before, self.last = self.last, self.strategy.train_step(*self.batches[self.taken % 4])
                self.taken += 1
                if before is not None:
                    before.read()
            float(self.last.read().loss)  # type: ignore[attr-defined]
        return (time.perf_counter() - began) / steps


@contextlib.contextmanager
def watched(samples: list[list[float]]) -> Any:
    """Adds (watt, MHz, is the power limit reached) of each sample that nvidia-smi takes meanwhile."""
    try:
        command = ["nvidia-smi", f"--query-gpu={ASKED}", "--format=csv,noheader,nounits", "-lms", "50"]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    except OSError:
        yield
        return
    yield
    process.terminate()
    for line in (process.communicate()[0] or "").splitlines():
        with contextlib.suppress(ValueError):
            power, clock, limited = line.split(", ")
            samples.append([float(power), float(clock), float(limited == "Active")])


def row_of(way: Way, first: Way, overrides: list[str]) -> dict[str, Any]:
    ratio = statistics.median(a / b for a, b in zip(first.steps_s, way.steps_s, strict=True))
    row = {"words": overrides, "step_ms": 1e3 * statistics.median(way.steps_s), "ratio": ratio, "rounds_s": way.steps_s}
    if way.samples:
        watt, clock, limited = zip(*way.samples, strict=True)
        row |= {"watt": statistics.median(watt), "mhz": statistics.median(clock), "limited": statistics.mean(limited)}
    result: Any = way.last
    return row | {"loss": float((result.read() if getattr(result, "late", False) else result).loss)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--json", type=Path)
    given = sys.argv[1:]
    cut = next((i for i, word in enumerate(given) if word in ("--rounds", "--json", "-h", "--help")), len(given))
    options = parser.parse_args(given[cut:])
    groups: list[list[str]] = [[]]
    for override in given[:cut]:
        groups.append([]) if override == "--" else groups[-1].append(override)
    common, ways_overrides = [*COMMON, *groups[0]], groups[1:] or [[]]

    from dtrain.launch.compose import compose
    from dtrain.preflight.network_env import environment

    os.environ |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1"}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29677"}
    os.environ |= environment(compose(common), os.environ)  # as a launched run has it
    import torch
    from throughput import environment as machine

    from dtrain.train import process as worker

    device = worker.join_process_group()
    torch._dynamo.config.recompile_limit = 64
    ways = []
    for overrides in ways_overrides:
        torch.manual_seed(0)
        ways.append(Way([*common, *overrides], device))
        ways[-1].run(4)
    first_s, *_ = [way.run(2) for way in ways]
    steps = max(2, round(BLOCK_S / first_s))
    for i in range(options.rounds):
        for way in ways if i % 2 else reversed(ways):
            if device.type == "cuda":
                torch.cuda.empty_cache()
            way.run(UNTIMED)
            with watched(way.samples):
                way.steps_s.append(way.run(steps))
    rows = [row_of(way, ways[0], overrides) for way, overrides in zip(ways, ways_overrides, strict=True)]
    print(f"{'':<40}{'ms a step':>10}{'ratio':>8}{'watt':>7}{'MHz':>7}{'limited':>9}{'loss':>8}")
    for row in rows:
        power = f"{row['watt']:>7.0f}{row['mhz']:>7.0f}{row['limited']:>9.0%}" if "watt" in row else " " * 23
        name = " ".join(row["words"]) or "as it is"
        print(f"{name:<40}{row['step_ms']:>10.2f}{row['ratio']:>8.4f}{power}{row['loss']:>8.4f}", flush=True)
    if options.json:
        content = {"benchmark": "turns", **machine(), "words": common, "steps_a_round": steps, "rows": rows}
        options.json.write_text(json.dumps(content, indent=1) + "\n")


if __name__ == "__main__":
    main()
