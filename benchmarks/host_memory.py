"""The memory of ranks on a CPU, as predicted before a launch and as measured: the peak resident size of each rank.

    python benchmarks/host_memory.py [--json benchmarks/results/host-memory-cpu.json]

plan/host_memory.py refuses a launch that this machine's memory cannot hold; CERTAIN_ON_CPU is its margin for
predictions that are too large. Each row is a real run of two steps.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from throughput import ROOT, environment

from dtrain.config.run_file import load
from dtrain.plan.host_memory import cpu_bytes
from dtrain.runs.folder import read_json

COMMON = ["train.steps=2", "train.eval_batches=0", "checkpoint=none", "guard.replicas_every=0"]
TEXT = ["data=synthetic"]
ROWS = {
    "gpt2-124m, 2 samples": ["model=gpt2-124m", *TEXT, "train.global_batch_size=2", "cluster.processes=1"],
    "gpt2-124m, 4 samples": ["model=gpt2-124m", *TEXT, "train.global_batch_size=4", "cluster.processes=1"],
    "gpt2-124m, 8 samples": ["model=gpt2-124m", *TEXT, "train.global_batch_size=8", "cluster.processes=1"],
    "gpt2-124m, 4 samples, bf16": [
        "model=gpt2-124m", *TEXT, "train.global_batch_size=4", "cluster.processes=1", "precision=bf16",
    ],
    "gpt2-124m, 4 samples, recomputed": [
        "model=gpt2-124m", *TEXT, "train.global_batch_size=4", "cluster.processes=1", "activation_checkpointing=full",
    ],
    "gpt2-124m, 4 samples, fsdp on 2": ["model=gpt2-124m", *TEXT, "train.global_batch_size=4", "strategy=fsdp"],
    "gpt2-124m, 4 samples, tensor on 2": ["model=gpt2-124m", *TEXT, "train.global_batch_size=4", "strategy=tensor"],
    "gpt2-350m, 2 samples": ["model=gpt2-350m", *TEXT, "train.global_batch_size=2", "cluster.processes=1"],
    "llama-tiny, 64 samples": ["model=llama-tiny", *TEXT, "train.global_batch_size=64", "cluster.processes=1"],
    "bert-base, 8 samples": [
        "model=bert-base", "data=stdlib-mlm", "train.global_batch_size=8", "cluster.processes=1",
    ],
}  # fmt: skip


def memory_of(words: list[str]) -> tuple[float, float]:
    """Run it; return GiB of all ranks, predicted and measured."""
    with tempfile.TemporaryDirectory() as folder:
        run_dir = Path(folder) / "run"
        command = [sys.executable, str(ROOT / "launch.py"), *words, *COMMON, f"run_dir={run_dir}", "force=true"]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            sys.exit(done.stdout + done.stderr)
        summary = read_json(run_dir / "summary.json")
        return cpu_bytes(load(run_dir)) / 2**30, float(summary["peak_mem_gib"] * summary["world_size"])


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--json", type=Path)
    parser.add_argument("--rows", nargs="*", default=[*ROWS])
    options = parser.parse_args()
    rows: list[dict[str, Any]] = []
    print(f"{'':<36} predicted  measured GiB  predicted / measured")
    for name in options.rows:
        predicted, found = memory_of(ROWS[name])
        rows.append({"row": name, "predicted_gib": predicted, "measured_gib": found, "ratio": predicted / found})
        print(f"{name:<36} {predicted:9.2f} {found:9.2f} {predicted / found:9.2f}", flush=True)
    if options.json:
        options.json.write_text(json.dumps({"environment": environment(), "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
