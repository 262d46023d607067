"""How fast does this machine train our models? Runs `launch.py` once a row and keeps what its summary.json says.

    python benchmarks/throughput.py [--rows NAME ...] [--json benchmarks/results/throughput-h200.json]

Data is synthetic, so that the figures are of the model and the strategy. tokens/s is from the median step after the
first; steps are timed in the loop, with logging and without evaluation or checkpoints.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
COMMON = ["data=synthetic", "train.eval_batches=0", "checkpoint.every=0", "precision=bf16", "train.steps=30"]
COMMON += ["deterministic=false"]
BATCH_32 = ["train.global_batch_size=32"]
IMAGES = ["data=digits", "train.loader_workers=8"]  # enlarged to 224 × 224: decoding is not what is measured
EMBEDDED = ["data=stdlib-lines"]
ROWS = {
    "gpt2-124m ddp, eager": ["model=gpt2-124m", "train.global_batch_size=32"],
    "gpt2-124m ddp, compile": ["model=gpt2-124m", "train.global_batch_size=32", "compile=true"],
    "gpt2-124m ddp, compile, deterministic": [
        *("model=gpt2-124m", "train.global_batch_size=32", "compile=true", "deterministic=true"),
    ],
    "gpt2-124m fsdp, compile": ["model=gpt2-124m", "train.global_batch_size=32", "compile=true", "strategy=fsdp"],
    "gpt2-1.5b ddp, compile": ["model=gpt2-1.5b", "train.global_batch_size=16", "compile=true"],
    "gpt2-1.5b fsdp, compile": ["model=gpt2-1.5b", "train.global_batch_size=16", "compile=true", "strategy=fsdp"],
    "gpt2-1.5b fsdp, compile, activation checkpointing": [
        *("model=gpt2-1.5b", "train.global_batch_size=16", "compile=true", "strategy=fsdp"),
        "activation_checkpointing=full",
    ],
    "llama-1b ddp, compile": [
        *("model=llama-1b", "model.seq_len=2048", "train.global_batch_size=8", "compile=true"),
    ],
    "llama-1b fsdp, compile": [
        *("model=llama-1b", "model.seq_len=2048", "train.global_batch_size=8", "compile=true", "strategy=fsdp"),
    ],
    # all of the training of 8 billion weights on one GPU; `predicted` has the plan of each
    **{
        f"llama-8b ddp, bf16-pure, moments in {state}, batch {batch}": [
            *("model=llama-8b", "model.seq_len=2048", "precision=bf16-pure", f"optim.state={state}", "compile=auto"),
            *(f"train.global_batch_size={batch}", f"train.micro_batch_size={batch}", "train.steps=12"),
        ]
        for state, batch in (("bf16", 4), ("int8", 4), ("int8", 8))
    },
    "bert-large ddp, classify": [
        *("model=bert-large", "model.task=classify", "model.num_classes=3", "model.seq_len=128", *BATCH_32, *EMBEDDED),
    ],
    "resnet50 ddp": ["model=resnet50", "train.global_batch_size=128", *IMAGES],
    "resnet50 ddp, compile": ["model=resnet50", "train.global_batch_size=128", "compile=true", *IMAGES],
    "vit-b16 ddp, compile": ["model=vit-b16", "train.global_batch_size=128", "compile=true", *IMAGES],
}
KEPT = ("model", "strategy", "precision", "world_size", "global_batch_size", "device", "unit", "tokens_per_s", "mfu")
KEPT += ("peak_mem_gib", "wall_s")


def measure(name: str, overrides: list[str]) -> dict[str, object]:
    with tempfile.TemporaryDirectory() as folder:
        run_dir = Path(folder) / "run"
        common = [o for o in COMMON if o.split("=")[0] not in {override.split("=")[0] for override in overrides}]
        command = [sys.executable, str(ROOT / "launch.py"), f"run_dir={run_dir}", *common, *overrides]
        result = subprocess.run(command, capture_output=True, text=True)
        if result.returncode:
            return {"row": name, "error": (result.stderr or result.stdout)[-500:]}
        summary = json.loads((run_dir / "summary.json").read_text())
    return {"row": name, **{key: summary[key] for key in KEPT}}


def environment() -> dict[str, object]:
    """What was measured on, with what: the head of every results file."""
    import torch

    import dtrain

    def git(*words: str) -> str:
        return subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True).stdout.strip()

    versions = {"python": platform.python_version(), "torch": torch.__version__, "dtrain": dtrain.__version__}
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else None
    commit = os.environ.get("COMMIT") or git("rev-parse", "--short", "HEAD")  # a copy of the tree may have no history
    return {
        "hardware": f"{torch.cuda.device_count()} × {gpu}" if gpu else f"{platform.machine()}, {os.cpu_count()} cores",
        "versions": versions,
        "commit": commit,
        "date": time.strftime("%Y-%m-%d"),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", nargs="*", default=list(ROWS), choices=list(ROWS), metavar="NAME")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    rows = []
    for name in options.rows:
        rows.append(measure(name, ROWS[name]))
        print(rows[-1], flush=True)
        if options.json:  # after each row: a lent machine may be taken back
            content = {"benchmark": "throughput", **environment(), "rows": rows}
            options.json.write_text(json.dumps(content, indent=1) + "\n")


if __name__ == "__main__":
    main()
