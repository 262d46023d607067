"""Does one word keep the loss curve on a GPU, and what does it cost? gpt2-1.5b under each strategy against ddp.

    python benchmarks/strategies.py [--rows NAME ...] [--json benchmarks/results/strategies-h200.json]

Each row is one `launch.py` with the same seed, data and global batch; its losses are compared with the first row's.
Several ranks share one GPU over gloo, which is slow: those rows are about losses and memory, not about speed.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path

from throughput import ROOT, environment

COMMON = ["model=gpt2-1.5b", "data=synthetic", "precision=bf16", "train.global_batch_size=8", "train.eval_batches=0"]
COMMON += ["checkpoint.every=0", "optim.lr=1e-4", "schedule.warmup_steps=2"]
ONE, TWO = ["cluster.processes=1", "train.steps=12"], ["cluster.processes=2", "train.steps=12", "train.stop_after=4"]
ROWS = {
    **{f"{s}, 1 rank": [f"strategy={s}", *ONE] for s in ("ddp", "fsdp", "zero1", "zero2", "zero3")},
    "zero3, 1 rank, optimizer and weights offloaded": [
        *("strategy=zero3", "strategy.offload=cpu", "strategy.offload_params=cpu", *ONE, "train.stop_after=4"),
    ],
    "fsdp, 1 rank, offloaded": ["strategy=fsdp", "strategy.offload=cpu", *ONE, "train.stop_after=4"],
    **{f"{s}, 2 ranks on one GPU": [f"strategy={s}", *TWO] for s in ("ddp", "fsdp", "tensor")},
    "tensor, 2 ranks on one GPU, sequence and loss parallel": [
        *("strategy=tensor", "strategy.sequence_parallel=true", "strategy.loss_parallel=true", *TWO),
    ],
}


def measure(name: str, overrides: list[str], reference: list[float]) -> dict[str, object]:
    """The last checkpoint of a run is 18 GiB; a benchmark of losses does without, on a disk of its own choosing."""
    with tempfile.TemporaryDirectory() as folder:
        run_dir = Path(folder) / "run"
        command = [sys.executable, str(ROOT / "launch.py"), f"run_dir={run_dir}", *COMMON, *overrides]
        result = subprocess.run(command, capture_output=True, text=True)
        if result.returncode:
            return {"row": name, "error": (result.stderr or result.stdout)[-1500:]}
        summary = json.loads((run_dir / "summary.json").read_text())
        lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    losses = [line["loss"] for line in lines if "loss" in line]
    reference.extend(losses if not reference else [])
    apart = max(abs(a - b) for a, b in zip(losses, reference, strict=False))
    return {
        "row": name, "strategy": summary["strategy"], "world_size": summary["world_size"], "mesh": summary["mesh"],
        "steps": len(losses), "losses": losses, "max_loss_diff": apart, "peak_mem_gib": summary["peak_mem_gib"],
        "tokens_per_s": summary["tokens_per_s"], "wall_s": summary["wall_s"],
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", nargs="*", default=list(ROWS), choices=list(ROWS), metavar="NAME")
    parser.add_argument("--json", type=Path)
    parser.add_argument("overrides", nargs="*", default=[], help="more settings for all rows, after --")
    options = parser.parse_args()
    rows: list[dict[str, object]] = []
    reference: list[float] = []
    for name in options.rows:
        rows.append(measure(name, [*ROWS[name], *options.overrides], reference))
        print({k: v for k, v in rows[-1].items() if k != "losses"}, flush=True)
        if options.json:  # after each row: a lent machine may be taken back
            content = {"benchmark": "strategies", **environment(), "rows": rows}
            options.json.write_text(json.dumps(content, indent=1) + "\n")


if __name__ == "__main__":
    main()
