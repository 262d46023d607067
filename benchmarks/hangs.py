"""Is the rank that hangs the one that is named, and how soon? And what does watching cost?

    python benchmarks/hangs.py --rounds 10 [--kinds stop sleep ...] [--strategies ddp fsdp ...] [--seed 0] [--json FILE]
    python benchmarks/hangs.py --cost [--rounds 15]

The first: real launches, each with a random rank that hangs at a random step in one of the ways of
tests/launch/test_hang.py. Counted: was that rank named, and how long after it hung was the message on the screen?
The second: one process takes turns between steps of gpt2-tiny at batch 2 with and without the position being noted,
the thread running as in a run; medians, as a share of a step.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks"), str(ROOT / "benchmarks" / "planner")]
TIMEOUT_S = 5


def one(folder: Path, how: str, strategy: str, ranks: int, calls: int, draw: random.Random) -> dict[str, Any]:
    """Launch one run that hangs."""
    from tests.launch.test_hang import HUNG
    from tests.world import SMALL

    who, step = draw.randrange(ranks), draw.randrange(5, 25)
    (folder / "hung.py").write_text(HUNG)
    command = [sys.executable, str(ROOT / "launch.py"), *SMALL, "run_dir=run", "model._target_=hung.Hung"]
    command += ["trust=[hung]", "train.steps=30", f"cluster.hang_timeout={TIMEOUT_S}", f"strategy={strategy}"]
    command += [f"cluster.processes={ranks}", "train.global_batch_size=24", "checkpoint.every=0"]
    at = step * calls + draw.randrange(calls) + 1
    env = os.environ | {"OMP_NUM_THREADS": "1", "HOW": how, "WHO": str(who), "AT": str(at)}
    log = folder / "screen"
    with open(log, "w") as screen:
        process = subprocess.Popen(command, cwd=folder, env=env, stdout=screen, stderr=screen)
        hung_at = said_at = None
        while process.poll() is None:
            if hung_at is None and (folder / "healed").exists():  # written right before it hangs
                hung_at = (folder / "healed").stat().st_mtime
            if said_at is None and "no progress for" in log.read_text():
                said_at = time.time()
            time.sleep(0.05)
    failure_file = folder / "run" / "failure.json"
    failure = json.loads(failure_file.read_text()) if failure_file.exists() else {}
    return {
        "kind": how, "strategy": strategy, "ranks": ranks, "who": who, "step": step, "named": failure.get("rank"),
        "right": failure.get("rank") == who, "type": failure.get("type"), "exit_code": process.returncode,
        "after_s": said_at - hung_at if said_at and hung_at else None,
    }  # fmt: skip


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

    from tests.launch.test_hang import KINDS, LAYOUTS

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--kinds", nargs="+", default=list(KINDS))
    parser.add_argument("--strategies", nargs="+", default=[layout[0] for layout in LAYOUTS])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--cost", action="store_true")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    if options.cost:
        rows = [cost(options.rounds)]
        print(rows[0])
    else:
        draw, rows = random.Random(options.seed), []
        for _ in range(options.rounds):
            for strategy, ranks, calls in [layout for layout in LAYOUTS if layout[0] in options.strategies]:
                for how in options.kinds:
                    with tempfile.TemporaryDirectory() as folder:
                        rows.append(one(Path(folder), how, strategy, ranks, calls, draw))
                    print(rows[-1], flush=True)
        right, latest = sum(row["right"] for row in rows), max(row["after_s"] or 0 for row in rows)
        print(
            f"{right} of {len(rows)} named rightly; latest message after {latest:.1f} s"
        )
    if options.json:
        content = {"benchmark": "hangs", **environment(), "rows": rows}
        options.json.write_text(json.dumps(content, indent=1) + "\n")


if __name__ == "__main__":
    main()
