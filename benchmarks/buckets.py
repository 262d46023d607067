"""Does strategy.bucket_mb=auto choose well? Its choices beside a sweep over all sizes, on links of two speeds.

    sudo python benchmarks/buckets.py [--links 100mbit 1gbit] [--choices 5] [--json benchmarks/results/buckets-cpu.json]

Two ranks under ddp, each in a network namespace of its own; a token bucket (tc tbf) at both ends of the pair of virtual
Ethernet devices between them limits the rate. In one world, auto chooses several times, each time from nothing; then
blocks of training steps with each size take turns, so that other load on the machine hits all sizes. The figure is the
median step of auto's choice over that of the best size. Nothing here passes or fails. It needs root,
and a machine without other load: load on the cores adds more to a pass than the sizes differ.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from throughput import environment

from dtrain.commands.verify import compare
from dtrain.config.run_file import save
from dtrain.launch.resolve import resolve

SPACES = ("dtrain-bench-a", "dtrain-bench-b")
MODEL = ["model.num_layers=6", "model.dim=256", "model.num_heads=4", "model.vocab_size=256", "model.seq_len=64"]
COMMON = [*MODEL, "data=synthetic", "train.eval_batches=0", "checkpoint.every=0", "train.global_batch_size=8"]
COMMON += ["cluster.processes=2", "schedule.warmup_steps=0"]
SWEEP_MB = (1, 2, 5, 10, 25)  # 25 holds all gradients of this model


# ---- inside a rank -----------------------------------------------------------------------------------------------


def rank_main(run_dir: Path, choices: int, rounds: int, block: int) -> None:
    import torch.distributed as dist

    from dtrain.checkpoint import background
    from dtrain.config import run_file
    from dtrain.config.run_file import Settings
    from dtrain.strategies import buckets
    from dtrain.strategies.ddp import DDP
    from dtrain.train import process
    from dtrain.train.setup import set_up
    from dtrain.train.startup import StartTimes

    cfg = Settings(run_file.completed(run_file.load(run_dir)) | {"trust": []})
    device = process.join_process_group()
    saver = background.Saver(run_dir / "checkpoints", 1, False, 0, None)
    run = set_up(run_dir, cfg, device, saver, StartTimes(run_dir))
    strategy = run.strategy
    assert isinstance(strategy, DDP)
    inputs, targets = run.train_data.batch(0)
    batch = inputs[: strategy.micro_batch_size], targets[: strategy.micro_batch_size]
    chosen = []
    for _ in range(choices):
        strategy.use_buckets(buckets.DEFAULT_MB)
        began = time.perf_counter()
        strategy.choose_buckets(*batch)
        chosen.append(strategy.choice | {"seconds": round(time.perf_counter() - began, 1)})
    num_bytes = sum(p.numel() * p.element_size() for p in strategy.module.parameters())
    times: dict[int, list[float]] = {mb: [] for mb in SWEEP_MB}
    for _ in range(rounds):
        for mb, found in times.items():
            strategy.use_buckets(mb)
            strategy.settle_buckets(*batch)
            dist.barrier()
            for _ in range(block):
                began = time.perf_counter()
                strategy.train_step(inputs, targets)
                found.append(time.perf_counter() - began)
    if dist.get_rank() == 0:
        steps = {str(mb): round(1000 * statistics.median(found), 3) for mb, found in times.items()}
        result = {"gradient_mib": round(num_bytes / 2**20, 1), "step_ms": steps, "chosen": chosen}
        (run_dir / "buckets.json").write_text(json.dumps(result))
    dist.barrier()
    os._exit(0)


# ---- outside: two namespaces and a link between them ---------------------------------------------------------------


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True)


def connect(rate: str) -> None:
    for space in SPACES:
        ip("netns", "add", space)
    ip("link", "add", "dtb0", "netns", SPACES[0], "type", "veth", "peer", "name", "dtb1", "netns", SPACES[1])
    for i, space in enumerate(SPACES):
        ip("-n", space, "addr", "add", f"10.231.7.{i + 1}/24", "dev", f"dtb{i}")
        for device in ("lo", f"dtb{i}"):
            ip("-n", space, "link", "set", device, "up")
        limit = ["tbf", "rate", rate, "burst", "256kb", "latency", "50ms"]
        subprocess.run(["tc", "-n", space, "qdisc", "add", "dev", f"dtb{i}", "root", *limit], check=True)


def disconnect() -> None:
    for space in SPACES:
        subprocess.run(["ip", "netns", "del", space], capture_output=True)


def in_spaces(rate: str, overrides: list[str], program: list[str], results: str) -> dict[str, Any]:
    """Run a program in both namespaces, for a run folder with these settings; return the JSON that it leaves there."""
    with tempfile.TemporaryDirectory() as folder:
        run_dir = Path(folder) / "run"
        (run_dir / "logs").mkdir(parents=True)
        words = [*COMMON, *overrides, f"run_dir={run_dir}.new"]
        save(run_dir, resolve(compare.compose(words)) | {"run_dir": str(run_dir)})
        disconnect()
        connect(rate)
        ranks = []
        ahead = ["chrt", "--rr", "1"]  # go before other load of the machine, where it allows it
        may = subprocess.run([*ahead, "true"], capture_output=True).returncode == 0
        try:
            for i, space in enumerate(SPACES):
                env = {"RANK": str(i), "LOCAL_RANK": str(i), "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
                env |= {"MASTER_ADDR": "10.231.7.1", "MASTER_PORT": "29571", "OMP_NUM_THREADS": "1"}
                env |= {"GLOO_SOCKET_IFNAME": f"dtb{i}"}
                first = ["ip", "netns", "exec", space, *(ahead if may else [])]
                command = [word.replace("RUN", str(run_dir)) for word in program]
                ranks.append(subprocess.Popen([*first, sys.executable, *command], env=os.environ | env))
            codes = [rank.wait() for rank in ranks]
        finally:
            for rank in ranks:
                rank.kill()
            disconnect()
        if any(codes):
            raise RuntimeError(f"{rate}: exit codes {codes}")
        found: dict[str, Any] = json.loads((run_dir / results).read_text())
        return found


def measure(rate: str, options: argparse.Namespace) -> dict[str, Any]:
    words = ["--choices", str(options.choices), "--rounds", str(options.rounds), "--block", str(options.block)]
    settings = ["strategy.bucket_mb=auto", "train.steps=1000000"]
    found = in_spaces(rate, settings, [__file__, "--rank-of", "RUN", *words], "buckets.json")
    best = min(found["step_ms"].values())
    ratios = [round(found["step_ms"][str(choice["bucket_mb"])] / best, 4) for choice in found["chosen"]]
    return {"link": rate, **found, "auto_over_best": ratios, "default_over_best": default_ratio(found["step_ms"])}


def default_ratio(steps: dict[str, float]) -> float:
    return round(steps["25"] / min(steps.values()), 4)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--links", nargs="*", default=["100mbit", "1gbit"])
    parser.add_argument("--choices", type=int, default=5, help="how often auto chooses")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--block", type=int, default=3, help="steps with one size before the next has its turn")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--rank-of", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank_of:
        rank_main(options.rank_of, options.choices, options.rounds, options.block)
    rows = []
    for link in options.links:
        rows.append(measure(link, options))
        print(json.dumps(rows[-1]), flush=True)
    if options.json:
        content = {"benchmark": "buckets", **environment(), "rows": rows}
        options.json.write_text(json.dumps(content, indent=1) + "\n")


if __name__ == "__main__":
    main()
