"""What do rare exchanges cost in loss? 500 steps of gpt2-tiny on text under ddp, local_sgd and diloco.

    python benchmarks/diloco.py [--rows NAME ...] [--json benchmarks/results/diloco-cpu.json]

All rows have the same samples in the same order, and the same inner optimizer and schedule. The validation loss is of
the last step, a multiple of every `every`: there the ranks hold one model. What a row sends: benchmarks/traffic.py.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path

from throughput import environment

from dtrain.commands.verify import compare

COMMON = ["model=gpt2-tiny", "data=stdlib", "train.steps=500", "train.global_batch_size=4", "optim.lr=2e-3"]
COMMON += ["train.eval_every=250", "train.eval_batches=32", "checkpoint.every=0", "guard.replicas_every=0"]
ROWS = {
    "ddp": [],
    "diloco every=20": ["strategy.every=20"],
    "local_sgd every=20": ["strategy.every=20"],
    "diloco every=20 int8": ["strategy.every=20", "strategy.exchange=int8"],
    "local_sgd every=4": [],
    "diloco every=20 fragments=4": ["strategy.every=20", "strategy.fragments=4"],
    "diloco every=50": ["strategy.every=50"],
}


def measure(name: str, ranks: int) -> dict[str, object]:
    strategy = name.split()[0]
    with tempfile.TemporaryDirectory() as folder:
        cfg = compare.compose([*COMMON, f"strategy={strategy}", *ROWS[name]])
        case = compare.make_case(strategy, ranks, "fp32", cfg, Path(folder) / "run")
        if case.refused:
            raise ValueError(case.refused)
        if problem := compare.run(case, timeout=3600):
            raise RuntimeError(problem)
        steps = compare.steps_of(case.run_dir)
        losses = {step: round(row["val_loss"], 4) for step, row in steps.items() if "val_loss" in row}
        return {"row": name, "ranks": ranks, "val_loss": losses[max(losses)], "val_losses": losses}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", nargs="*", default=list(ROWS), choices=list(ROWS), metavar="NAME")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    rows = []
    for name in options.rows:
        rows.append(measure(name, options.ranks))
        print(rows[-1], flush=True)
        if options.json:
            content = {"benchmark": "diloco", **environment(), "settings": COMMON, "rows": rows}
            options.json.write_text(json.dumps(content, indent=1) + "\n")


if __name__ == "__main__":
    main()
