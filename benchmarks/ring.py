"""What does a ring of send/recv cost against ddp? Steps of both strategies in turns, on the same ranks.

    python benchmarks/ring.py [--rounds 9] [--json benchmarks/results/ring-cpu.json]

Both strategies live in the same processes and take turns of a few steps, so that a busy machine slows both; the ratio
of a round is compared, and the median of all rounds given. What each sends: benchmarks/traffic.py.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks")]
MODEL = ["model.num_layers=8", "model.dim=256", "model.num_heads=4", "model.vocab_size=256", "model.seq_len=64"]
STEPS = 3  # of a turn


def take_turns(out: Path, rounds: int) -> None:
    import torch
    import torch.distributed as dist

    from dtrain.checkpoint.initial_weights import Drawn
    from dtrain.config.build import build
    from dtrain.launch.compose import compose

    torch.set_num_threads(1)
    config = compose([*MODEL, "data=synthetic"])
    tokens = torch.randint(0, 256, (2, 65), generator=torch.Generator().manual_seed(dist.get_rank()))
    strategies: dict[str, Any] = {}
    for name in ("ddp", "ring"):
        with torch.device("meta"):
            model = build(config["model"])
        strategies[name] = build(compose([f"strategy={name}"])["strategy"])
        common = {"precision": build(config["precision"]), "device": torch.device("cpu"), "first": Drawn(1)}
        strategies[name].setup(model, build(config["optim"], global_batch_size=8), **common, micro_batch_size=2)

    def turn(name: str) -> float:
        dist.barrier()
        began = time.perf_counter()
        for _ in range(STEPS):
            strategies[name].train_step(tokens[:, :-1], tokens[:, 1:]).read()
        return (time.perf_counter() - began) / STEPS

    for name in strategies:
        turn(name)
    times: dict[str, list[float]] = {name: [] for name in strategies}
    for i in range(rounds):
        for name in list(times)[:: 1 if i % 2 else -1]:
            times[name].append(turn(name))
    if dist.get_rank() == 0:
        out.write_text(json.dumps(times))


def measure(ranks: int, rounds: int) -> dict[str, Any]:
    from tests.world import spawn

    with tempfile.TemporaryDirectory() as folder:
        spawn(ranks, take_turns, Path(folder) / "times.json", rounds, timeout=900)
        times = json.loads((Path(folder) / "times.json").read_text())
    ratios = sorted(ring / ddp for ring, ddp in zip(times["ring"], times["ddp"], strict=True))
    return {
        "ranks": ranks, "rounds": rounds, "ddp_ms": round(statistics.median(times["ddp"]) * 1e3, 1),
        "ring_ms": round(statistics.median(times["ring"]) * 1e3, 1), "ratio": round(statistics.median(ratios), 3),
        "ratios": [round(ratio, 3) for ratio in ratios],
    }  # fmt: skip


def main() -> None:
    from throughput import environment

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    rows = []
    for ranks in (2, 4):
        rows.append(measure(ranks, options.rounds))
        print(rows[-1], flush=True)
    if options.json:
        options.json.write_text(json.dumps({"benchmark": "ring", **environment(), "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
