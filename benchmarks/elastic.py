"""Ranks that come and go: is the run the same as an undisturbed one, how much is lost, and how soon is it back?

    python benchmarks/elastic.py [--events 50] [--steps 600] [--strategies ddp fsdp ...] [--seed 0] [--json FILE]

One launched run per strategy with 1 to 4 ranks. At random steps a random rank leaves (SIGTERM) or is killed, or more
ranks join; rank 0, which hosts the store, is killed most often. Compared with a run of 2 ranks that nothing disturbs:
the losses of all steps. Counted: the samples of each step, from what the model was given; steps that were trained
again; seconds from the event until the first step with the new ranks was over.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks")]


def one(strategy: str, events: int, steps: int, every: int, seed: int, pause: float) -> dict[str, Any]:
    from tests.elastic import ElasticRun, apart, assess, check_samples, disturb

    options = [f"train.steps={steps}", f"strategy={strategy}", f"checkpoint.every={every}"]
    with tempfile.TemporaryDirectory() as folder:
        plain = ElasticRun(Path(folder) / "plain", *options, "cluster.processes=2")
        assert plain.join(1800) == 0, plain.screen
        run = ElasticRun(Path(folder) / "elastic", *options, "cluster.processes=1:4", pause=pause)
        try:
            happened = disturb(run, events, steps, [1, 2, 3, 4], random.Random(seed))
            assert run.join(1800) == 0, run.screen
        finally:
            run.kill()
        rows = assess(happened, run.generations())
        difference, samples = apart(run.run_dir, plain.run_dir), check_samples(run.generations(), steps)
    back = [row["back_s"] for row in rows]
    lost = {kind: [row["lost_steps"] for row in rows if row["kind"] == kind] for kind in ("leave", "join", "kill")}
    return {
        "strategy": strategy, "events": len(rows), "kinds": {kind: len(steps) for kind, steps in lost.items()},
        "kills_of_rank_0": sum(row["kind"] == "kill" and row["rank"] == 0 for row in rows),
        "largest_loss_difference": difference, "distinct_samples": samples, "expected_samples": steps * 12,
        "most_steps_lost": {kind: max(steps, default=0) for kind, steps in lost.items()},
        "back_s_median": statistics.median(back), "back_s_max": max(back), "rows": rows,
    }  # fmt: skip


def main() -> None:
    from throughput import environment

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--strategies", nargs="+", default=["ddp", "fsdp", "tensor", "zero2"])
    parser.add_argument("--events", type=int, default=50)
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--every", type=int, default=10, help="checkpoint.every")
    parser.add_argument("--pause", type=float, default=0.02, help="seconds that a forward pass waits")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    rows = []
    for strategy in options.strategies:
        rows.append(one(strategy, options.events, options.steps, options.every, options.seed, options.pause))
        rows[-1]["load"] = os.getloadavg()[2]  # of the last 15 minutes: other work slows a recovery down
        print({key: value for key, value in rows[-1].items() if key != "rows"}, flush=True)
        if options.json:
            settings = {key: getattr(options, key) for key in ("events", "steps", "every", "pause", "seed")}
            content = {"benchmark": "elastic", **environment(), **settings, "results": rows}
            options.json.write_text(json.dumps(content, indent=1) + "\n")


if __name__ == "__main__":
    main()
