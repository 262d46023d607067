"""Kills on Ray: does a run lose anything that was saved, how soon is it back, and is anything left at its end?

    python benchmarks/ray_kills.py [--kills 10] [--steps 400] [--strategies ddp fsdp] [--seed 0] [--json FILE]

A real Ray cluster: a head and two nodes, all processes of this machine, a rank on each node. At random moments a rank,
the actor above it, or a whole node is ended by SIGKILL (and a new node joins). For each kill: the newest checkpoint at
that moment, the step from which the run continued, the seconds until the first new step was over. At the end: are the
weights those of a run that nothing disturbed, and is an actor's process or a placement group left?
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks")]
KINDS = ("rank", "actor", "node")


def kill(kind: str, run: Path, cluster: Any, draw: random.Random) -> int:
    """End one of the run's processes, or the node with its rank; return which rank."""
    from tests.ray_runs import ranks_of

    rank = draw.choice(ranks_of(run))
    number, actor = int(rank.environ()["RANK"]), rank.parent()
    if kind == "rank":
        rank.kill()
    elif kind == "actor":
        actor.kill()
    else:
        raylet = actor.parent().pid
        node = next(n for n in cluster.worker_nodes if raylet in [p.pid for _, p in n.live_processes()])
        cluster.remove_node(node, allow_graceful=False)
        cluster.add_node(num_cpus=1)
    return number


def first_new_step(run: Path, since: float) -> tuple[int, float]:
    """Wait for the first step of the next attempt; return where it started, and when that step was over."""
    from dtrain.runs.folder import read_json
    from tests.patience import until
    from tests.world import metrics

    def new_steps() -> list[dict[str, Any]]:
        summary, path = read_json(run / "summary.json"), run / "summary.json"
        if summary.get("status") != "running" or path.stat().st_mtime < since:
            return []
        return [row for row in metrics(run) if row["step"] > summary["start_step"] and row["time"] > since]

    until(new_steps, "a step after a kill", 120, lambda: (run / "logs/ray.log").read_text()[-2000:])
    return int(read_json(run / "summary.json")["start_step"]), float(new_steps()[0]["time"])


def one(strategy: str, kills: int, steps: int, every: int, seed: int) -> dict[str, Any]:
    import ray
    from ray.util import placement_group_table

    from dtrain.runs.folder import newest_step
    from tests.ray_runs import ON_TWO, actors, attempts, finish, launch, two_nodes, until_step
    from tests.world import summary

    draw, rows = random.Random(seed), []
    options = [f"train.steps={steps}", f"strategy={strategy}", f"checkpoint.every={every}"]
    with tempfile.TemporaryDirectory() as folder, two_nodes() as cluster:
        here, run = Path(folder), Path(folder) / "ray"
        finish(launch(here, "cluster.processes=2", *options, "run_dir=plain"))
        words = [f"cluster.address={cluster.address}", f"cluster.max_restarts={kills + 5}", "run_dir=ray"]
        process = launch(here, *ON_TWO, *options, *words)
        until_step(run, 1)
        for number in range(kills):
            until_step(run, int((number + draw.random()) * steps / (kills + 1)) + 1)
            time.sleep(draw.uniform(0, 0.3))
            kind, saved, began = KINDS[number % 3], newest_step(run), time.time()
            rank = kill(kind, run, cluster, draw)
            after_s = time.time() - began  # until a new node has joined
            start, stepped = first_new_step(run, began)
            events = [json.loads(line) for line in (run / "attempts.jsonl").read_text().splitlines()][-2:]
            times = {name: round(then - began, 2) for name, then in [
                ("new_node_s", began + after_s), ("attempt_ended_s", events[0]["time"]),
                ("ranks_placed_s", events[1]["time"]), ("back_s", stepped),
            ]}  # fmt: skip
            found = {"kind": kind, "rank": rank, "newest_checkpoint": saved, "continued_from": start}
            rows.append(found | times | {"load": round(os.getloadavg()[0], 1)})
            print(strategy, rows[-1], flush=True)
        finish(process)
        ray.init(address=cluster.address, log_to_driver=False, logging_level="ERROR")
        groups = [group for group in placement_group_table().values() if group["state"] != "REMOVED"]
        left = len(actors())
        ray.shutdown()
        same = summary(run)["weights_sha256"] == summary(here / "plain")["weights_sha256"]
        starts = len(attempts(run))
    back = {kind: [row["back_s"] for row in rows if row["kind"] == kind] for kind in KINDS}
    return {
        "strategy": strategy, "kills": len(rows), "starts": starts,
        "lost_checkpoints": sum(row["continued_from"] < row["newest_checkpoint"] for row in rows),
        "same_weights": same, "actors_left": left, "placement_groups_left": len(groups),
        "back_s_median": {kind: statistics.median(times) for kind, times in back.items()},
        "back_s_max": max(row["back_s"] for row in rows), "rows": rows,
    }  # fmt: skip


def main() -> None:
    from throughput import environment

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--strategies", nargs="+", default=["ddp", "fsdp"])
    parser.add_argument("--kills", type=int, default=10)
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--every", type=int, default=10, help="checkpoint.every")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    results = []
    for strategy in options.strategies:
        results.append(one(strategy, options.kills, options.steps, options.every, options.seed))
        print({key: value for key, value in results[-1].items() if key != "rows"}, flush=True)
        if options.json:
            import ray

            about = environment()
            about["versions"] |= {"ray": ray.__version__}  # type: ignore[operator]
            settings = {key: getattr(options, key) for key in ("kills", "steps", "every", "seed")}
            content = {"benchmark": "ray_kills", **about, **settings, "results": results}
            options.json.write_text(json.dumps(content, indent=1) + "\n")


if __name__ == "__main__":
    main()
