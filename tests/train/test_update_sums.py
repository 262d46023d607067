"""Who writes weights and optimizer state, besides the kernel that keeps checksums of them; that is tested on a GPU."""

from __future__ import annotations

from pathlib import Path

import torch

from dtrain.checkpoint import resume_point, store
from dtrain.strategies.base import Strategy
from dtrain.strategies.replicas import Replicas
from dtrain.train.guard import Guard, run_twice
from dtrain.train.update_sums import can_watch, is_ours
from dtrain.util.dtensor import local
from tests.strategies.test_replicas import batch, set_up
from tests.train.moving_model import Moving
from tests.world import make_run, spawn

LAYOUTS = [
    ("ddp", ["model.dropout=0.1"]),
    ("fsdp", []),
    ("fsdp", ["strategy.sharding=grad_op"]),
    ("tensor", ["strategy.tp=2"]),
    ("pipeline", ["strategy.pp=2"]),
]


@torch.no_grad()
def versions(strategy: Strategy) -> dict[str, int]:
    """How often torch has written to each tensor that the optimizer updates, as kernels/adamw.py reads it."""
    found = {}
    for name, p in strategy.module.named_parameters():
        for key, tensor in {"weight": p, **strategy.optimizer.state[p]}.items():
            found[f"{name} {key}"] = local(tensor)._version
    return found


def check_what_is_counted(run_dirs: list[Path]) -> None:
    for run_dir in run_dirs:
        strategy = set_up(run_dir)
        strategy.train_step(*batch(strategy, 1))
        after_update = versions(strategy)
        strategy.forward_backward(*batch(strategy, 2))
        strategy.optimizer.zero_grad(set_to_none=True)
        run_twice(strategy, 2, *batch(strategy, 2))
        strategy.optimizer.zero_grad(set_to_none=True)
        strategy.eval_step(*batch(strategy, 3))
        strategy.model.train()
        state, extra = strategy.state_dict(), strategy.extra_state()
        Replicas(strategy).check(1, state)
        store.save(run_dir / "checkpoints", 1, state, {"extra": extra}, keep=1)
        assert versions(strategy) == after_update, "nothing but an update writes: every step is watched"
        found = resume_point.newest_good(run_dir / "checkpoints")
        assert found is not None
        calls: list[int] = []
        strategy.optimizer.forget_sums = lambda done=calls: done.append(1)  # type: ignore[attr-defined]
        store.load(*found, state)
        strategy.load_state_dict(state, found[1]["extra"])
        assert calls, "a loaded checkpoint is no flipped bit"
        loaded = versions(strategy)
        if "ddp" in run_dir.name:  # torch does not count what is written to a shard of a DTensor
            assert all(loaded[name] > count for name, count in after_update.items())


def test_only_updates_and_loads_write_weights_and_optimizer_state(tmp_path: Path) -> None:
    options = ["cluster.processes=2", "model.num_layers=2"]
    runs = [
        make_run(tmp_path / f"{i}-{strategy}", f"strategy={strategy}", *options, *overrides)
        for i, (strategy, overrides) in enumerate(LAYOUTS)
    ]
    spawn(2, check_what_is_counted, runs)


def check_who_is_watched(run_dirs: dict[str, Path]) -> None:
    for name, run_dir in run_dirs.items():
        strategy = set_up(run_dir)
        assert Guard(strategy, 5, 0).updates is None and not can_watch(strategy), "there is no kernel on a CPU"
        strategy.device = torch.device("cuda")
        assert can_watch(strategy) == (name == "ddp"), name


def test_only_where_nothing_else_writes(tmp_path: Path) -> None:
    assert not is_ours(object.__new__(Moving))
    runs = {name: make_run(tmp_path / name, f"strategy={name}", "cluster.processes=2") for name in ("ddp", "zero1")}
    spawn(2, with_kernel, runs)


def with_kernel(run_dirs: dict[str, Path]) -> None:
    from dtrain.train import update_sums

    update_sums.has_kernel = lambda: True  # type: ignore[assignment]
    check_who_is_watched(run_dirs)
