"""Do the fast paths learn as the plain path does? Loss curves over 200 steps, the same seed and text, path by path.

    python benchmarks/curves.py [--paths NAME ...] [--together N] [--json benchmarks/results/curves-h200.json]
    python benchmarks/curves.py --cpu [--steps 40]        (gpt2-tiny, to see that all paths run)
    python benchmarks/curves.py --steps 500 --paths "moments in bf16" "moments in int8"
    … --cpu --set precision=fp32 precision.stream=float32                             (a CPU is slow in bf16)

Each path is one `launch.py` on the standard library's source, the text that every machine has, and its metrics.jsonl is
held against that of the plain path: eager, deterministic, nothing fused, float32 parameters. Two runs of the same maths
that round differently drift apart as training goes on, so the largest difference of single steps says little by itself;
"rounding alone" is the plain path in two micro-batches, which shows how far that goes. What counts is that the curve
is neither better nor worse: the mean difference over the last 50 steps, against the tolerance. The run is ended after
its last step, before it saves. With --together, several paths share the GPU: the curves are the same, speeds are left
out.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from throughput import ROOT, environment

Overrides = dict[str, Any]
COMMON: Overrides = {
    "model": "gpt2-124m", "data": "stdlib", "train.global_batch_size": 16, "train.eval_batches": 0, "optim.lr": 3e-4,
    "checkpoint.every": 0, "cluster.processes": 1, "schedule.warmup_steps": 20, "train.log_every": 1,
}  # fmt: skip
TINY: Overrides = {"model": "gpt2-tiny", "model.seq_len": 64, "train.global_batch_size": 8}
# The path that all others are held against: every setting that is fast by default is named here with its plain value.
PLAIN: Overrides = {
    "strategy": "ddp", "precision": "bf16", "precision.stream": "float32", "compile": "none", "fused_loss": "false",
    "deterministic": "true", "activation_checkpointing": "none",
}  # fmt: skip
FAST: Overrides = {"precision.stream": "bfloat16", "compile": "auto", "fused_loss": "auto", "deterministic": "false"}
# What a path has instead. `{}` is the plain path itself.
PATHS: dict[str, Overrides] = {
    "plain": {},
    "rounding alone (two micro-batches)": {"train.micro_batch_size": 8},
    "defaults, ddp": FAST,
    "defaults, fsdp": FAST | {"strategy": "fsdp"},
    "defaults, zero2": FAST | {"strategy": "zero2"},
    "compiled by blocks": FAST | {"compile": "blocks"},
    "head and loss in one": {"fused_loss": "true"},
    "bf16 residual stream": {"precision.stream": "bfloat16"},
    "checkpointing, ops": FAST | {"activation_checkpointing": "ops"},
    "checkpointing, full": FAST | {"activation_checkpointing": "full"},
    "precision=bf16-pure": FAST | {"precision": "bf16-pure"},
    "precision=fp8": FAST | {"precision": "fp8"},  # needs torchao and a GPU that has it
    "precision=fp32": {"precision": "fp32"},
    "moments in bf16": {"optim.state": "bf16"},
    "moments in int8": {"optim.state": "int8"},
    "precision=bf16-pure, moments in int8": FAST | {"precision": "bf16-pure", "optim.state": "int8"},
}
TINY_BATCHES = {"train.micro_batch_size": 4}  # instead of the 8 above, of a global batch of 8
TOLERANCE = 0.02  # of the mean loss over the last steps
LAST = 50


def losses_of(overrides: Overrides, steps: int, timeout_s: float) -> dict[str, Any]:
    """One run: its losses, and its tokens a second where it had the machine for itself."""
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:  # ranks that end may still write
        run_dir = Path(folder) / "run"
        settings = [f"{key}={value}" for key, value in overrides.items()]
        command = [sys.executable, str(ROOT / "launch.py"), f"run_dir={run_dir}", f"train.steps={steps}", *settings]
        launch = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        output: list[str] = []
        reader = threading.Thread(target=lambda: output.append(launch.stdout.read()), daemon=True)  # type: ignore[union-attr]
        reader.start()
        began, lines = time.perf_counter(), []
        try:
            while len(lines) < steps and time.perf_counter() - began < timeout_s:
                ended = launch.poll() is not None
                lines = read_lines(run_dir / "metrics.jsonl")
                if ended:
                    break
                time.sleep(0.2)
        finally:
            launch.kill()  # and with it, by the kernel, torchrun and the ranks: a checkpoint is not what is looked at
            launch.wait()
            reader.join(10)
        wall_s = time.perf_counter() - began
        if len(lines) < steps:
            notes = [json.loads(p.read_text())["message"] for p in (run_dir / "logs").glob("failure-*.json")]
            return {"error": ("".join(notes) or "".join(output))[-600:], "steps": len(lines), "wall_s": wall_s}
        rates = [line["tokens_per_s"] for line in lines[len(lines) // 4 :] if line.get("tokens_per_s")]
        return {
            "losses": [line["loss"] for line in lines], "wall_s": wall_s,
            "tokens_per_s": statistics.median(rates) if rates else None,
        }  # fmt: skip


def read_lines(path: Path) -> list[dict[str, Any]]:
    """The steps so far; the last line may be half there."""
    whole = path.read_text().split("\n")[:-1] if path.exists() else []
    return [line for line in map(json.loads, whole) if line.get("loss") is not None]


def compare(name: str, overrides: Overrides, found: dict[str, Any], plain: list[float] | None) -> dict[str, Any]:
    row: dict[str, Any] = {"row": name, "words": overrides}
    if "error" in found or plain is None:
        return row | {"error": found.get("error", "the plain path failed"), "wall_s": found["wall_s"]}
    apart = [a - b for a, b in zip(found["losses"], plain, strict=True)]
    last = statistics.mean(apart[-LAST:])
    return row | {
        "first_diff": apart[0], "max_abs_diff": max(map(abs, apart)), "mean_diff_last": last,
        "within": abs(last) <= TOLERANCE, "final_loss": found["losses"][-1],
        "mean_loss_last": statistics.mean(found["losses"][-LAST:]), "tokens_per_s": found["tokens_per_s"],
        "wall_s": found["wall_s"], "losses": found["losses"],
    }  # fmt: skip


def table(rows: list[dict[str, Any]], steps: int) -> str:
    """For a page of the docs."""
    lines = [
        f"| path | first step | largest difference of {steps} steps | mean difference, last {min(LAST, steps)} "
        "| final loss | tokens/s |",
        "|---|---|---|---|---|---|",
    ]
    for row in rows:
        if "error" in row:
            lines.append(f"| {row['row']} | failed: {row['error'].strip().splitlines()[-1][:80]} | | | | |")
            continue
        rate = f"{row['tokens_per_s']:,.0f}" if row["tokens_per_s"] else ""
        mark = "" if row["within"] else f" (over {TOLERANCE})"
        lines.append(
            f"| {row['row']} | {row['first_diff']:+.5f} | {row['max_abs_diff']:.4f} "
            f"| {row['mean_diff_last']:+.4f}{mark} | {row['final_loss']:.4f} | {rate} |"
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--paths", nargs="*", default=list(PATHS), choices=list(PATHS), metavar="NAME")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--together", type=int, default=1, help="paths that run at once")
    parser.add_argument("--timeout", type=float, default=300, help="seconds for one path")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--cpu", action="store_true", help="gpt2-tiny")
    parser.add_argument("--set", nargs="*", default=[], metavar="KEY=VALUE", help="settings of all paths")
    options = parser.parse_args()

    names = ["plain", *(name for name in options.paths if name != "plain")]
    common = COMMON | (TINY if options.cpu else {})
    given = dict(word.split("=", 1) for word in options.set)
    overrides = {name: common | PLAIN | PATHS[name] | given for name in names}
    for chosen in overrides.values():
        if options.cpu and "train.micro_batch_size" in chosen:
            chosen |= TINY_BATCHES
    head, rows, plain = environment(), [], None
    with ThreadPoolExecutor(options.together) as pool:
        runs = {name: pool.submit(losses_of, overrides[name], options.steps, options.timeout) for name in names}
        for name, run in runs.items():
            found = run.result()
            if options.together > 1:
                found["tokens_per_s"] = None
            if name == "plain":
                plain = found.get("losses")
            rows.append(compare(name, overrides[name], found, plain))
            print({k: v for k, v in rows[-1].items() if k not in ("losses", "words")}, flush=True)
            if options.json:  # after each row: a lent machine may be taken back
                content = {"benchmark": "curves", **head, "tolerance": TOLERANCE, "last": LAST, "rows": rows}
                options.json.write_text(json.dumps(content, indent=1) + "\n")
    print(table(rows, options.steps))


if __name__ == "__main__":
    main()
