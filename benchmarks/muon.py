"""Muon against AdamW: time of a step, and tokens until the same validation loss.

    python benchmarks/muon.py [--minutes 12] [--json benchmarks/results/muon-h200.json]
    python benchmarks/muon.py --cpu                 (gpt2-tiny for a few steps, to see that all of it runs)

Steps: gpt2-124m with a batch of 32 × 1024, blocks of steps in turn in one process (turns.py). Loss: each seed trains
once with AdamW for --steps steps and once with Muon for --share of them, each with its whole cosine schedule, and
evaluates on the same held-out text. The text is every .py file that is installed for this Python, as bytes; its hash
and how often it was read are printed. With --lrs several peak rates are tried with seed 0 and a quarter of the steps,
for both. Runs that would begin after --minutes are left out, and said.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import subprocess
import sys
import sysconfig
import tempfile
import time
from pathlib import Path
from typing import Any

from throughput import ROOT, environment

MODEL = ["model=gpt2-124m", "model.vocab_size=256", "train.global_batch_size=16", "precision=bf16"]
TINY = ["model=gpt2-tiny", "model.seq_len=64", "train.global_batch_size=8", "precision=fp32"]
TIMED = ["model=gpt2-124m", "train.global_batch_size=32"]
OPTIMIZERS = ("adamw", "muon")


def corpus(folder: Path) -> dict[str, Any]:
    """Return what the text is, by its hash: of all files, each with its path inside the folder."""
    digest, size, count = hashlib.sha256(), 0, 0
    for path in sorted(folder.glob("**/*.py")):
        if path.is_file():
            text = path.read_bytes()
            digest.update(f"{path.relative_to(folder).as_posix()}\0{len(text)}\0".encode() + text)
            size, count = size + len(text), count + 1
    return {"folder": str(folder), "files": count, "bytes": size, "sha256": digest.hexdigest()}


def step_times(cpu: bool) -> dict[str, Any]:
    """Milliseconds of a step of both, and their ratio, from blocks of steps in turn."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "turns.json"
        model = [*TINY, "data=synthetic"] if cpu else TIMED
        ways = ["--", "optim=adamw", "--", "optim=muon"]
        command = [sys.executable, str(ROOT / "benchmarks" / "turns.py"), *model, *ways, "--json", str(file)]
        done = subprocess.run([*command, *(["--rounds", "3"] if cpu else [])], capture_output=True, text=True)
        if done.returncode:
            return {"error": (done.stderr or done.stdout)[-1500:]}
        adamw, muon = json.loads(file.read_text())["rows"]
    # turns.py's ratio is the first's time over the other's
    return {"adamw_ms": adamw["step_ms"], "muon_ms": muon["step_ms"], "muon_over_adamw": 1 / muon["ratio"]}


def train(optim: str, lr: float, seed: int, steps: int, options: argparse.Namespace) -> dict[str, Any]:
    """One run: its validation losses by tokens."""
    with tempfile.TemporaryDirectory() as folder:
        run_dir = Path(folder) / "run"
        every = max(1, steps // 40)
        settings = [
            *(TINY if options.cpu else MODEL), f"optim={optim}", f"optim.lr={lr}", f"train.seed={seed}",
            f"train.steps={steps}", f"schedule.warmup_steps={max(1, steps // 20)}", "schedule.min_ratio=0.05",
            "data=text", f"data.path={options.corpus}", "data.pattern='**/*.py'", "data.val_fraction=0.02",
            f"train.eval_every={every}", f"train.eval_batches={4 if options.cpu else 16}", "checkpoint.every=0",
            "cluster.processes=1", "deterministic=false",
        ]  # fmt: skip
        command = [sys.executable, str(ROOT / "launch.py"), f"run_dir={run_dir}", *settings]
        began = time.perf_counter()
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            return {"optim": optim, "seed": seed, "error": (done.stderr or done.stdout)[-1500:]}
        rows: dict[int, dict[str, Any]] = {}
        for line in (run_dir / "metrics.jsonl").read_text().splitlines():
            rows.setdefault(json.loads(line)["step"], {}).update(json.loads(line))
        per_step = json.loads((run_dir / "summary.json").read_text())["tokens_per_step"]
    curve = {step * per_step: row["val_loss"] for step, row in rows.items() if row.get("val_loss") is not None}
    row = {"optim": optim, "lr": lr, "seed": seed, "steps": steps, "wall_s": time.perf_counter() - began}
    return row | {"final": curve[max(curve)], "tokens": max(curve), "curve": curve}


def share(adamw: dict[str, Any], muon: dict[str, Any]) -> float | None:
    """Return Muon's tokens, relative to AdamW's, when it first has AdamW's final loss; None: it never has."""
    reached = [tokens for tokens, loss in muon["curve"].items() if loss <= adamw["final"]]
    return min(reached) / adamw["tokens"] if reached else None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=12)
    parser.add_argument("--steps", type=int, default=2000, help="of AdamW")
    parser.add_argument("--share", type=float, default=0.8, help="of these steps that Muon gets")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--adamw-lr", type=float, default=1e-3)
    parser.add_argument("--muon-lr", type=float, default=1e-3)
    parser.add_argument("--lrs", type=float, nargs="*", default=[], help="peak rates to try first, for both")
    parser.add_argument("--corpus", type=Path, default=Path(sysconfig.get_paths()["purelib"]))
    parser.add_argument("--json", type=Path)
    parser.add_argument("--only", choices=("steps", "loss"))
    parser.add_argument("--cpu", action="store_true", help="gpt2-tiny, a few steps")
    options = parser.parse_args()
    ends = time.monotonic() + 60 * options.minutes
    content: dict[str, Any] = {"benchmark": "muon", **environment()}

    def keep(**more: Any) -> None:  # after each row: a lent machine may be taken back
        content.update(more)
        if options.json:
            options.json.write_text(json.dumps(content, indent=1) + "\n")

    if options.only != "loss":
        keep(step=step_times(options.cpu))
        print(content["step"], flush=True)
    if options.only == "steps":
        return
    text = corpus(options.corpus)
    keep(corpus=text)
    print(text, flush=True)
    if options.cpu:
        options.steps, options.seeds = 40, 1
    tried: list[dict[str, Any]] = []
    rates = {"adamw": options.adamw_lr, "muon": options.muon_lr}
    for optim in OPTIMIZERS if options.lrs else ():
        tried += [train(optim, lr, 0, options.steps // 4, options) for lr in options.lrs]
        keep(tried=tried)
        rates[optim] = min((r for r in tried if r["optim"] == optim), key=lambda r: r.get("final", 1e9))["lr"]
        print(optim, {row.get("lr"): row.get("final", row.get("error")) for row in tried if row["optim"] == optim})
    rows: list[dict[str, Any]] = []
    steps = options.steps
    for seed in range(options.seeds):
        for optim in OPTIMIZERS:
            if time.monotonic() > ends:
                print(f"{optim}, seed {seed}: left out, the time is up", flush=True)
                continue
            count = steps if optim == "adamw" else round(options.share * steps)
            rows.append(train(optim, rates[optim], seed, count, options))
            print({k: v for k, v in rows[-1].items() if k != "curve"}, flush=True)
            keep(rows=rows)
            if "error" in rows[-1]:
                raise SystemExit(1)
    results = []
    for seed in range(options.seeds):
        pair = {row["optim"]: row for row in rows if row["seed"] == seed}
        if len(pair) == 2:
            epochs = pair["adamw"]["tokens"] / text["bytes"]
            results.append({
                "seed": seed, "adamw": pair["adamw"]["final"], "muon": pair["muon"]["final"], "epochs": epochs,
                "share_of_tokens": share(pair["adamw"], pair["muon"]),
            })  # fmt: skip
            print(results[-1], flush=True)
    keep(results=results)


if __name__ == "__main__":
    main()
