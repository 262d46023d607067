"""Gradient accumulation communicates once: how much each strategy reduces in a step of one pass, and in one of four.

What is counted is what torch's flight recorder has of the data ranks' reductions, and for ring its own trace (no
recorder has gloo's send/recv). docs/strategies.md has the table.
"""

from __future__ import annotations

import json
import math
import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch._C import _distributed_c10d as c10d

from dtrain.checkpoint.initial_weights import Drawn
from dtrain.config.build import build
from dtrain.config.run_file import load
from tests.world import STRATEGIES, make_run, spawn

# ranks, and how many times as much is reduced in four passes: 1 = once a step, 4 = in every pass, 0 = nothing at all
REDUCED: dict[str, tuple[int, int]] = {
    "ddp": (2, 1),
    "ring": (2, 1),
    "fairscale": (2, 1),
    "fairscale strategy.mode=oss": (2, 1),
    "local_sgd": (2, 0),  # only in every 4th step
    "diloco": (2, 0),  # only in every 10th step
    "local_sgd strategy.every=1": (2, 1),
    "diloco strategy.every=1": (2, 1),
    # a rank keeps only its shard of the gradients between two passes
    "fsdp": (2, 4),
    "fsdp strategy.sharding=grad_op": (2, 1),
    "fsdp strategy.sharding=hybrid strategy.replica_size=1": (2, 1),
    "zero1": (2, 1),
    "zero2": (2, 4),
    "zero3": (2, 4),
    "tensor strategy.tp=2": (4, 4),
    "tensor strategy.tp=2 strategy.data=ddp": (4, 1),
    # the schedule runs all passes, and the gradients are reduced after the last
    "pipeline strategy.pp=2": (4, 1),
    "3d": (8, 1),
}
SAMPLES = 8  # of a data rank


def test_every_strategy_is_listed() -> None:
    # ps sends and receives, and horovod has its own collectives: torch records neither
    assert {name.split()[0] for name in REDUCED} == set(STRATEGIES) - {"ps", "horovod"}


@pytest.mark.parametrize("case", REDUCED)
def test_what_a_step_reduces(case: str, tmp_path: Path) -> None:
    strategy, *options = case.split()
    ranks, expected = REDUCED[case]
    options += ["strategy.trace=9"] if strategy == "ring" else []
    run = make_run(tmp_path / "run", f"strategy={strategy}", f"cluster.processes={ranks}", *options, "model.dropout=0")
    spawn(ranks, steps_with_passes, run, tmp_path)
    once, often = (json.loads((tmp_path / f"reduced-{passes}.json").read_text()) for passes in (2, 8))
    print(case, once, often)
    assert often["elements"] == expected * once["elements"] or (expected == 0 and often["elements"] == 0)
    if expected:
        assert once["elements"] > 1000


def steps_with_passes(run_dir: Path, out: Path) -> None:
    """Write what the second step reduces, in 2 passes and in 8: a pipeline of two stages needs two."""
    cfg = load(run_dir)
    for passes in (2, 8):
        with torch.device("meta"):
            model = build(cfg.model)
        strategy = build(cfg.strategy)
        strategy.folder = out
        (out / "logs").mkdir(exist_ok=True)
        strategy.setup(
            model,
            build(cfg.optim, global_batch_size=8),
            precision=build(cfg.precision),
            device=torch.device("cpu"),
            first=Drawn(1),
            micro_batch_size=SAMPLES // passes,
        )
        tokens = torch.randint(0, 61, (SAMPLES, 17), generator=torch.Generator().manual_seed(dist.get_rank()))
        strategy.train_step(tokens[:, :-1], tokens[:, 1:]).read()  # ddp builds its buckets, DeepSpeed its order
        before = len(entries()), len(messages(out))
        strategy.train_step(tokens[:, :-1], tokens[:, 1:]).read()
        mine = sorted(dist.get_process_group_ranks(strategy.data_group))
        reduced = [e for e in entries()[before[0] :] if is_reduction(e, mine)]
        found = {"calls": len(reduced), "elements": sum(map(elements, reduced))}
        found["elements"] += sum(message["bytes"] for message in messages(out)[before[1] :]) // 4
        dist.barrier()
        if dist.get_rank() == 0:
            (out / f"reduced-{passes}.json").write_text(json.dumps(found))


def entries() -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(c10d._dump_fr_trace_json(includeCollectives=True, onlyActive=False))[
        "entries"
    ]
    assert len(found) < int(os.environ.get("TORCH_FR_BUFFER_SIZE", 2000)), "older entries are lost"
    return found


def messages(out: Path) -> list[dict[str, Any]]:
    path = out / "logs" / f"ring-trace-{dist.get_rank()}.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def is_reduction(entry: dict[str, Any], ranks: list[int]) -> bool:
    """A reduction over the data ranks, of more than loss, flags and norm. gloo's reduce-scatter is an all-reduce."""
    world = dist.distributed_c10d._world
    members = {world.pg_names.get(group): sorted(world.pg_group_ranks[group]) for group in world.pg_map}
    op = entry["profiling_name"].partition(":")[2]
    is_sum = op in ("all_reduce", "reduce", "reduce_scatter", "_reduce_scatter_base")
    return is_sum and members.get(entry["process_group"][0]) == ranks and elements(entry) > 4


def elements(entry: dict[str, Any]) -> int:
    return sum(math.prod(size) for size in entry["input_sizes"])
