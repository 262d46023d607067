"""Does `dtrain why` recognise injected faults: the right cause and the right rank? And how soon is a hang named?

    python benchmarks/faults.py --rounds 10 --jobs 5 [--strategies ddp fsdp ...] [--kinds ...] [--seed 0] [--json FILE]

For each strategy one short run, then `dtrain chaos` with it: a real launch per fault, at a random rank and step.
Prints what was not recognised, the confusion matrix, and how long after each hang its message came.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks")]
LAYOUTS = {"ddp": 3, "fsdp": 3, "tensor": 4, "pipeline": 3}  # ranks: with three or more, a majority shows who differs
TINY = ["model.num_layers=6", "model.dim=32", "model.num_heads=4", "model.vocab_size=61", "model.vocab_multiple=16",
        "model.seq_len=16", "data=synthetic", "train.global_batch_size=24", "train.eval_batches=0",
        "checkpoint.every=5", "guard.replicas_every=5"]  # fmt: skip


def chaos(folder: Path, strategy: str, seed: int, options: argparse.Namespace) -> list[dict[str, Any]]:
    """One run of the strategy, and what became of the faults in copies of it."""
    env = os.environ | {"OMP_NUM_THREADS": "1"}
    dtrain, run = [sys.executable, "-m", "dtrain.cli"], folder / strategy
    if not run.exists():
        launch = [*dtrain, "launch", *TINY, f"strategy={strategy}", f"cluster.processes={LAYOUTS[strategy]}"]
        subprocess.run([*launch, "train.steps=8", f"run_dir={run}"], cwd=ROOT, env=env, check=True, capture_output=True)
    command = [*dtrain, "chaos", str(run), "--seed", str(seed), "--json"]
    command += ["--jobs", str(options.jobs), "--folder", str(folder / f"chaos-{strategy}-{seed}")]
    command += ["--kinds", *options.kinds] if options.kinds else []
    done = subprocess.run(command, cwd=ROOT, env=env, stdout=subprocess.PIPE, text=True)
    return [row | {"strategy": strategy, "ranks": LAYOUTS[strategy]} for row in json.loads(done.stdout)]


def main() -> None:
    from throughput import environment

    from dtrain.faults.kinds import KINDS

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--kinds", nargs="+", default=[])
    parser.add_argument("--strategies", nargs="+", default=list(LAYOUTS))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(dir=os.environ.get("DTRAIN_FAULTS_FOLDER")) as folder:
        seeds = range(options.seed, options.seed + options.rounds)
        for seed, strategy in [(seed, strategy) for seed in seeds for strategy in options.strategies]:
            found = chaos(Path(folder), strategy, seed, options)
            rows += found
            for row in [row for row in found if not row["right"]]:
                print(strategy, row["fault"], row["cause"], row["rank"], row["text"][:300], flush=True)
            if options.json:
                content = {"benchmark": "faults", **environment(), "rows": rows}
                options.json.write_text(json.dumps(content, indent=1) + "\n")
    matrix = Counter((KINDS[row["fault"]["kind"]].cause, row["cause"]) for row in rows)
    for (truth, found), count in sorted(matrix.items()):
        print(f"{truth:<12} -> {found:<12} {count}")
    after = sorted(row["named_after_s"] for row in rows if row["named_after_s"] is not None)
    right = sum(row["right"] for row in rows)
    print(f"{right} of {len(rows)} recognised ({right / len(rows):.1%})")
    if after:
        print(f"hangs named after {after[len(after) // 2]:.1f} s (median), {after[-1]:.1f} s (longest)")


if __name__ == "__main__":
    main()
