"""What does watching for hangs cost? How soon and how rightly they are named: faults.py.

    python benchmarks/hangs.py [--rounds 15] [--json FILE]

One process takes turns between steps of gpt2-tiny at batch 2 with and without the position being noted, the thread
running as in a run; medians, as a share of a step.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks"), str(ROOT / "benchmarks" / "planner")]


def cost(rounds: int) -> dict[str, Any]:
    """The share of a step that noting the position takes."""
    import torch.distributed as dist
    from measure import batch_of
    from replicas import set_up

    from dtrain.config.run_file import Settings
    from dtrain.launch.compose import compose
    from dtrain.train import process
    from dtrain.train.position import Position

    os.environ |= {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29517"}
    device = process.join_process_group()
    cfg = Settings(compose(["model=gpt2-tiny", "train.global_batch_size=2"]))
    strategy, batch = set_up(cfg, device), batch_of(cfg, 2, device)

    class Nothing:
        def enter(self, phase: str, step: int) -> None:
            pass

    def steps(position: Any, count: int = 60) -> float:
        began = time.perf_counter()
        for step in range(count):
            position.enter("data", step)
            position.enter("step", step)
            strategy.train_step(*batch).read()
        return (time.perf_counter() - began) / count

    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "logs").mkdir()
        steps(Nothing())
        with_it, without = [], []
        for turn in range(2 * rounds):
            if turn % 4 in (1, 2):  # each is first as often as second
                position = Position(Path(folder), 0)  # rank 0 writes most
                with_it.append(steps(position))
                position.end()
            else:
                without.append(steps(Nothing()))
        position = Position(Path(folder), 0)
        began = time.perf_counter()
        for step in range(100_000):
            position.enter("step", step)
        enter_us = (time.perf_counter() - began) * 10
        began = time.perf_counter()
        for _ in range(200):
            position._write()
        write_us = (time.perf_counter() - began) / 200 * 1e6
        position.end()
    dist.destroy_process_group()
    step_s = statistics.median(without)
    return {
        "step_ms": step_s * 1e3, "ratio": statistics.median(a / b for a, b in zip(with_it, without, strict=True)),
        "enter_us": enter_us, "write_us": write_us,
        "computed_share": (2 * enter_us + write_us * step_s) * 1e-6 / step_s,  # one write a second
    }  # fmt: skip


def main() -> None:
    from throughput import environment

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    found = cost(options.rounds)
    print(found)
    if options.json:
        content = {"benchmark": "hangs", **environment(), **found}
        options.json.write_text(json.dumps(content, indent=1) + "\n")


if __name__ == "__main__":
    main()
