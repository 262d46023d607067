"""What does it cost to compare replicas? The time of a check beside that of a step, and its share of a run.

    python benchmarks/replicas.py [--ranks 2] [--rows NAME ...] [--strategy ddp] [--every 50] [--rounds 9]
                                  [--interleaved N] [--json FILE]
    python benchmarks/replicas.py --updates [--precisions bf16 bf16-pure] [--rounds 9] [--json FILE]

Steps and checks take turns, so that other load on the machine hits both; medians over the rounds. A check is all that
`guard.replicas_every` adds: checksums of weights and optimizer state, the all-reduce, and the wait for its result. With
one rank (the default where there is a GPU) there is nothing to compare with: then only the checksums are measured, and
the wait for them. What only one rank holds, as under fsdp, is summed twice for each check, and compared in between:
`rest_ms` is both. The share depends on the samples a step has: the rows say how many.

--interleaved N: N times as many steps as an interval has, with the guard and without, in turns.
--updates: instead, what the checksums cost that AdamW's kernel keeps on a GPU: blocks of steps with them and without,
in turns, and the kernel alone. The steps run without a CUDA graph, which would keep the kernel it was captured with.
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
ROWS = {
    "gpt2-tiny": ["model=gpt2-tiny"],
    "gpt2-124m": ["model=gpt2-124m", "train.global_batch_size=32"],
    "gpt2-124m, short": ["model=gpt2-124m", "model.seq_len=128", "train.global_batch_size=4"],  # for a CPU
}
TARGET = 0.002  # of a step


def set_up(cfg: Any, device: Any) -> Any:
    """The strategy as dtrain/train/loop.py sets it up, with weights that are the same on all ranks."""
    import torch.distributed as dist

    from dtrain.checkpoint.initial_weights import Drawn
    from dtrain.config.build import build
    from dtrain.train import build as models

    strategy = build(cfg.strategy).for_world(dist.get_world_size())
    size = cfg.train.global_batch_size // dist.get_world_size()
    strategy.setup(
        models.make(cfg), build(cfg.optim, global_batch_size=cfg.train.global_batch_size), first=Drawn(0),
        precision=build(cfg.precision), device=device, micro_batch_size=cfg.train.micro_batch_size or size,
        max_grad_norm=cfg.train.max_grad_norm, compile=cfg.compile, cuda_graphs=cfg.cuda_graphs,
    )  # fmt: skip
    return strategy


def measure(overrides: list[str], every: int, rounds: int, interleaved: int, file: Path) -> int:
    """One rank: rounds of some steps and a check; rank 0 leaves the row in a file."""
    import torch
    import torch.distributed as dist
    from measure import batch_of

    from dtrain.config.run_file import Settings
    from dtrain.launch.compose import compose
    from dtrain.strategies.checksums import checksums
    from dtrain.strategies.replicas import held_tensors
    from dtrain.train import process
    from dtrain.train.guard import Guard
    from dtrain.util.dtensor import local

    device = process.join_process_group()
    cfg = Settings(compose(overrides))
    strategy = set_up(cfg, device)
    world_size = dist.get_world_size()
    batch = batch_of(cfg, cfg.train.global_batch_size // world_size, device)
    guard = Guard(strategy, every, 0)

    def step() -> None:
        strategy.set_lr(0.1)
        strategy.train_step(*batch).read()

    def check() -> None:
        if world_size > 1:
            guard.replicas.check(0)
        else:
            checksums([local(t) for t in held_tensors(strategy, None).values()], device).sum().item()

    def rest() -> None:
        """What a check adds for tensors with one holder."""
        if world_size > 1 and guard.holds_alone is not False:
            before = guard.sums_at_rest()
            if before is not None:
                guard.compare_at_rest(before)

    def guarded(number: int) -> None:
        """As the loop does it; one rank computes the checksums that several would compare."""
        guard.before_step(number)
        step()
        guard.after_step(number)
        if world_size == 1 and number % every == 0:
            check()

    def timed(work: Any, times: int) -> float:
        if device.type == "cuda":
            torch.cuda.synchronize()
        if world_size > 1:
            dist.barrier()
        began = time.perf_counter()
        for _ in range(times):
            work()
        return (time.perf_counter() - began) / times

    for _ in range(10 if device.type == "cuda" else 1):  # compiles, and decides whether a step is a CUDA graph
        step()
    check()
    rest()
    steps = max(1, min(10, round(1.0 / timed(step, 1))))
    steps_s, checks_s, rests_s = [], [], []
    for _ in range(rounds):
        steps_s.append(timed(step, steps))
        checks_s.append(timed(check, 3 if world_size == 1 else 1))
        rests_s.append(timed(rest, 1))
    step_s, check_s, rest_s = (statistics.median(some) for some in (steps_s, checks_s, rests_s))
    turns = []
    for _ in range(interleaved):
        plain = timed(lambda: [step() for _ in range(every)], 1)
        turns.append(timed(lambda: [guarded(number) for number in range(1, every + 1)], 1) / plain - 1)
    tensors = held_tensors(strategy, None).values()
    if dist.get_rank() == 0:
        row = {
            "model": cfg.choices.model, "strategy": cfg.choices.strategy, "precision": cfg.choices.precision,
            "ranks": world_size, "global_batch_size": cfg.train.global_batch_size, "seq_len": cfg.model.seq_len,
            "tensors": len(tensors), "mib": sum(local(t).numel() * t.element_size() for t in tensors) / 2**20,
            "step_ms": 1e3 * step_s, "check_ms": 1e3 * check_s, "rest_ms": 1e3 * rest_s, "replicas_every": every,
            "share": (check_s + rest_s) / (every * step_s),
            "steps_for_target": (check_s + rest_s) / (TARGET * step_s),
            "interleaved_share": statistics.median(turns) if turns else None, "rounds_interleaved": turns,
            "rounds_step_s": steps_s, "rounds_check_s": checks_s, "rounds_rest_s": rests_s,
        }  # fmt: skip
        file.write_text(json.dumps(row))
    dist.barrier()
    return 0


def measure_updates(overrides: list[str], rounds: int, file: Path) -> int:
    """One rank with a GPU: steps, and updates alone, with checksums in the kernel and without, in turns."""
    import torch
    from measure import batch_of

    from dtrain.config.run_file import Settings
    from dtrain.launch.compose import compose
    from dtrain.train import process

    device = process.join_process_group()
    cfg = Settings(compose([*overrides, "cuda_graphs=none"]))
    strategy = set_up(cfg, device)
    optimizer: Any = strategy.optimizer
    batch = batch_of(cfg, cfg.train.global_batch_size, device)
    one = torch.ones((), device=device)

    def step() -> None:
        strategy.set_lr(0.1)
        strategy.train_step(*batch)

    def update() -> None:
        optimizer.step_if(one, one)

    def compare() -> None:
        optimizer.compare()

    def timed(work: Any, times: int, watched: bool) -> float:
        """Seconds of the GPU, which runs behind Python. The first call may compile, or compute the sums anew."""
        optimizer.watched = watched
        work()
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        for _ in range(times):
            work()
        end.record()
        end.synchronize()
        return float(begin.elapsed_time(end)) / 1e3 / times

    for _ in range(10):
        step()
    times: dict[str, list[float]] = {}
    for i in range(rounds):
        for watched in (False, True) if i % 2 else (True, False):
            times.setdefault("watched" if watched else "plain", []).append(timed(step, 10, watched))
    generator = torch.Generator(device).manual_seed(0)
    for p in strategy.module.parameters():
        p.grad = torch.randn(p.shape, generator=generator, device=device, dtype=p.dtype) * 1e-3
    for i in range(4 * rounds):
        for watched in (False, True) if i % 2 else (True, False):
            times.setdefault("watched update" if watched else "plain update", []).append(timed(update, 20, watched))
        times.setdefault("compare", []).append(timed(compare, 5, True))
    found = {name: 1e3 * statistics.median(some) for name, some in times.items()}
    shares = [b / a - 1 for a, b in zip(times["plain"], times["watched"], strict=True)]
    row = {
        "model": cfg.choices.model, "precision": cfg.choices.precision, "ranks": 1,
        "global_batch_size": cfg.train.global_batch_size, "seq_len": cfg.model.seq_len,
        "step_ms": found["plain"], "watched_step_ms": found["watched"], "update_us": 1e3 * found["plain update"],
        "watched_update_us": 1e3 * found["watched update"], "compare_us": 1e3 * found["compare"],
        "share_in_turn": statistics.median(shares),
        "share": (found["watched update"] - found["plain update"]) / found["plain"], "rounds_s": times,
    }  # fmt: skip
    file.write_text(json.dumps(row))
    return 0


def updates(precisions: list[str], rounds: int, json_file: Path | None) -> None:
    from dtrain.commands.verify.world import World

    rows = []
    print(f"{'':<12}{'ms a step':>12}{'watched':>10}{'share':>9}{'us an update':>14}{'watched':>10}"
          f"{'share of a step':>17}{'us a comparison':>17}")
    for precision in precisions:
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder) / "row.json"
            overrides = ["strategy=ddp", f"precision={precision}", "cluster.nodes=1", "cluster.processes=1"]
            codes = World(1, measure_updates, [*overrides, *ROWS["gpt2-124m"]], rounds, file).join(3600)
            if any(codes):
                sys.exit(f"{precision}: the rank ended with {codes}")
            rows.append(row := json.loads(file.read_text()))
        print(f"{precision:<12}{row['step_ms']:>12.2f}{row['watched_step_ms']:>10.2f}{row['share_in_turn']:>9.2%}"
              f"{row['update_us']:>14.0f}{row['watched_update_us']:>10.0f}{row['share']:>17.3%}"
              f"{row['compare_us']:>17.0f}", flush=True)
    if json_file:
        from throughput import environment

        content = {"benchmark": "replicas --updates", **environment(), "rows": rows}
        json_file.write_text(json.dumps(content, indent=1) + "\n")


def main() -> None:
    from dtrain.commands.verify.world import World
    from dtrain.config.hardware import count_gpus

    gpus = count_gpus()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=1 if gpus else 2)
    parser.add_argument("--rows", nargs="*", choices=list(ROWS), metavar="NAME")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--strategy", default="ddp")
    parser.add_argument("--every", type=int, default=50, help="guard.replicas_every")
    parser.add_argument("--interleaved", type=int, default=0)
    parser.add_argument("--updates", action="store_true")
    parser.add_argument("--precisions", nargs="*", default=["bf16", "bf16-pure"], help="of --updates")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    if options.updates:
        if not gpus:
            sys.exit("--updates needs a GPU: on a CPU the optimizer is torch's own")
        return updates(options.precisions, options.rounds, options.json)
    common = [f"strategy={options.strategy}", f"precision={'bf16' if gpus else 'fp32'}", "cluster.nodes=1"]
    rows = []
    print(f"{'':<20}{'ranks':>6}{'MiB':>8}{'ms a step':>12}{'ms a check':>12}{'at rest':>9}{'share':>9}{'in turn':>9}"
          f"   (target {TARGET:.1%} at every {options.every})")
    for name in options.rows or (["gpt2-124m"] if gpus else ["gpt2-tiny", "gpt2-124m, short"]):
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder) / "row.json"
            overrides = [*common, f"cluster.processes={options.ranks}", *ROWS[name]]
            arguments = (overrides, options.every, options.rounds, options.interleaved, file)
            codes = World(options.ranks, measure, *arguments).join(3600)
            if any(codes):
                sys.exit(f"{name}: ranks ended with {codes}")
            row = {"row": name, **json.loads(file.read_text())}
        rows.append(row)
        times = f"{row['mib']:>8.0f}{row['step_ms']:>12.1f}{row['check_ms']:>12.2f}{row['rest_ms']:>9.2f}"
        turn = "" if row["interleaved_share"] is None else f"{row['interleaved_share']:>9.3%}"
        print(f"{name:<20}{row['ranks']:>6}{times}{row['share']:>9.3%}{turn}", flush=True)
    if options.json:
        from throughput import environment

        content = {"benchmark": "replicas", **environment(), "target_share": TARGET, "rows": rows}
        options.json.write_text(json.dumps(content, indent=1) + "\n")


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    main()
