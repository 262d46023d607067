"""Does one word keep the loss curve on a GPU, and what does it cost? gpt2-1.5b under each strategy against ddp.

    python benchmarks/strategies.py [--rows NAME ...] [--json benchmarks/results/strategies-h200.json]

Each row is one `launch.py` with the same seed, data and global batch; its losses are compared with those of ddp.
Several ranks share one GPU over gloo, which is slow: those rows are about losses and memory, not about speed.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from throughput import ROOT, environment

COMMON = ["model=gpt2-1.5b", "data=synthetic", "precision=bf16", "train.global_batch_size=8", "train.eval_batches=0"]
COMMON += ["checkpoint.every=0", "optim.lr=1e-4", "schedule.warmup_steps=20", "deterministic=false"]
COMMON += ["train.steps=1000"]
ONE, TWO = ["cluster.processes=1"], ["cluster.processes=2"]
NUM_STEPS = {1: 12, 2: 4}  # by the ranks
ROWS = {
    **{f"{s}, 1 rank": [f"strategy={s}", *ONE] for s in ("ddp", "fsdp", "zero1", "zero2", "zero3")},
    "fsdp, 1 rank, offloaded": ["strategy=fsdp", "strategy.offload=cpu", *ONE],
    "zero2, 1 rank, optimizer offloaded": ["strategy=zero2", "strategy.offload=cpu", *ONE],
    "zero3, 1 rank, optimizer and weights offloaded": [
        *("strategy=zero3", "strategy.offload=cpu", "strategy.offload_params=cpu", *ONE),
    ],
    # 25 heads cannot be halved: these have 20, with the same parameters, and are compared with each other
    **{
        f"{s}, {n} rank{'s on one GPU' * (n > 1)}, 20 heads": [f"strategy={s}", "model.num_heads=20", ranks]
        for s, n, ranks in (("ddp", 1, *ONE), ("ddp", 2, *TWO), ("fsdp", 2, *TWO), ("tensor", 2, *TWO))
    },
    "tensor, 2 ranks on one GPU, 20 heads, sequence and loss parallel": [
        *("strategy=tensor", "strategy.sequence_parallel=true", "strategy.loss_parallel=true", "model.num_heads=20"),
        *TWO,
    ],
}


def measure(
    name: str, overrides: list[str], references: dict[bool, list[float]], timeout_s: float = 150
) -> dict[str, object]:
    """Read the metrics as they come and then kill the run: a checkpoint of 18 GiB is not what is measured here."""
    num_steps = 4 if "offload" in name else NUM_STEPS[int(overrides[-1].rpartition("=")[2])]
    with tempfile.TemporaryDirectory() as folder:
        run_dir = Path(folder) / "run"
        command = [sys.executable, str(ROOT / "launch.py"), f"run_dir={run_dir}", *COMMON, *overrides]
        launch = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        began, lines = time.perf_counter(), []
        while len(lines) < num_steps and launch.poll() is None and time.perf_counter() - began < timeout_s:
            time.sleep(0.2)
            path = run_dir / "metrics.jsonl"
            lines = [json.loads(x) for x in path.read_text().splitlines()] if path.exists() else []
        launch.kill()  # and with it, by the kernel, torchrun and the ranks
        output = launch.communicate()[0]
        if len(lines) < num_steps:
            notes = [json.loads(p.read_text())["traceback"] for p in (run_dir / "logs").glob("failure-*.json")]
            return {"row": name, "error": "".join(notes)[-1500:] or f"{len(lines)} steps. {output[-1500:]}"}
        summary = json.loads((run_dir / "summary.json").read_text())
        time.sleep(5)  # until the GPU's memory is free again
    losses = [line["loss"] for line in lines][:num_steps]
    expected = references.setdefault("20 heads" in name, losses)
    apart = max(abs(a - b) for a, b in zip(losses, expected, strict=False))
    return {
        "row": name, "strategy": summary["strategy"], "world_size": summary["world_size"], "mesh": summary["mesh"],
        "steps": len(losses), "losses": losses, "max_loss_diff": apart, "mem_gib": max(x["mem_gib"] for x in lines),
        "tokens_per_s": statistics.median(x["tokens_per_s"] for x in lines[1:]),
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", nargs="*", default=list(ROWS), choices=list(ROWS), metavar="NAME")
    parser.add_argument("--json", type=Path)
    parser.add_argument("overrides", nargs="*", default=[], help="more settings for all rows, after --")
    options = parser.parse_args()
    rows: list[dict[str, object]] = []
    references: dict[bool, list[float]] = {}
    for name in options.rows:
        rows.append(measure(name, [*ROWS[name], *options.overrides], references))
        print({k: v for k, v in rows[-1].items() if k != "losses"}, flush=True)
        if options.json:  # after each row: a lent machine may be taken back
            content = {"benchmark": "strategies", **environment(), "rows": rows}
            options.json.write_text(json.dumps(content, indent=1) + "\n")


if __name__ == "__main__":
    main()
