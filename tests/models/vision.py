"""Runs of models for pictures: small, on the digits that are inside the package."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from dtrain.commands.verify import compare
from dtrain.config.run_file import save
from dtrain.launch.resolve import resolve

SMALL = [
    "data=digits", "train.steps=10", "train.global_batch_size=12", "train.eval_every=0", "train.eval_batches=2",
    "checkpoint.every=0", "schedule.warmup_steps=5",
]  # fmt: skip


def make_run(run_dir: Path, *overrides: str, base: Sequence[str] = SMALL) -> Path:
    """A run folder as the launcher would write it; one that is there is given another configuration."""
    config = resolve(compare.compose([*base, f"run_dir={run_dir}.new", *overrides])) | {"run_dir": str(run_dir)}
    (run_dir / "logs").mkdir(parents=True, exist_ok=True)
    save(run_dir, config)
    return run_dir
