"""What a rank of `dtrain verify` notes besides its metrics: the samples and the random state of each step, and the
whole state after one update.

It wraps the strategy's train_step in this process only, as dtrain/faults does: the training code knows nothing of it.
After its first update, an optimizer's moment is the gradient of each parameter, whatever the layout.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from dtrain.checkpoint import store
from dtrain.strategies.base import Strategy
from dtrain.train import loop
from dtrain.train.run import Run
from dtrain.util.fingerprints import fingerprints

NOTES = "logs/verify-{}.jsonl"  # by rank
UPDATES = "updates"  # the folder of the states after an update


def install(run_dir: Path, save_after: Sequence[int]) -> None:
    """Note each step of the run that this process will train; save the state after these steps."""
    ranks: Any = loop  # the module, some of whose names are replaced in this process
    usual = ranks.set_up

    def set_up(*arguments: Any) -> Run:
        run = usual(*arguments)
        watch(run, run_dir, save_after)
        return run

    ranks.set_up = set_up


def watch(run: Run, run_dir: Path, save_after: Sequence[int]) -> None:
    strategy = run.strategy
    usual = strategy.train_step
    place = [strategy.mesh.get_local_rank(axis) for axis in ("pp", "dp", "tp")]
    file = open(run_dir / NOTES.format(dist.get_rank()), "a")  # noqa: SIM115  # until the process ends

    def train_step(inputs: Any, targets: Any) -> Any:
        note = {
            "step": run.step + 1, "rank": dist.get_rank(), "place": place, "data_rank": strategy.data_rank,
            "random": random_state(), "samples": fingerprints((inputs, targets)),
            "ids": run.train_data.indices(run.samples).tolist(),
        }  # fmt: skip
        print(json.dumps(note), file=file, flush=True)
        result = usual(inputs, targets)
        # a strategy with different math has other gradients, and some change their course at a save
        if run.step + 1 in save_after and strategy.tolerance is None:
            save(strategy, run_dir, run.step + 1)
        return result

    strategy.train_step = train_step  # type: ignore[method-assign]


def save(strategy: Strategy, run_dir: Path, step: int) -> None:
    meta = {"samples": 0, "data": "", "extra": strategy.extra_state()}
    store.save(run_dir / UPDATES, step, strategy.state_dict(), meta, keep=9)


def random_state() -> int:
    """Return a checksum of the state of torch's generators: what a layer's dropout will draw from."""
    found = zlib.crc32(torch.get_rng_state().numpy().data)
    return zlib.crc32(torch.cuda.get_rng_state().numpy().data, found) if torch.cuda.is_initialized() else found
