"""The page of `dtrain report`: its size, and the time until it can be used, in a real headless Chromium.

    python benchmarks/report_page.py [--json benchmarks/results/report-page-cpu.json]

The runs are made up by `make_run`: every kind of line that a real run writes, with noise, which compresses badly. Time
to interactive is from the start of the navigation until the page has drawn its first charts (performance.mark).
"""

from __future__ import annotations

import argparse
import json
import math
import os
import random
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.throughput import environment
from dtrain.report.page import write

CHROMIUM = "/usr/bin/chromium"
START = 1_790_000_000.0
MODEL = {"name": "gpt2-124m-fsdp", "model": "gpt2-124m", "strategy": "fsdp", "precision": "bf16"}


def make_run(run_dir: Path, seed: int = 0, steps: int = 10_000, ranks: int = 8, status: str = "done") -> Path:
    """Write a run folder as a training run on 8 GPUs leaves it: with a plan, a profile, attempts and system metrics."""
    draw = random.Random(seed)
    lr, layers = 10 ** draw.uniform(-4, -2.5), draw.choice([6, 12, 24])
    optimizer = draw.choice(["adamw", "muon", "lion"])
    floor = 2.6 + 0.35 * abs(math.log10(lr / 6e-4)) + 0.25 / layers + 0.1 * draw.random()
    (run_dir / "logs").mkdir(parents=True)
    (run_dir / "profiles").mkdir()
    lines = list(metrics(draw, steps, ranks, lr, floor))
    (run_dir / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    plan = {"tokens_per_s": 1.32e6, "mfu": 0.41, "wall_s": 0.4 * steps}
    plan["step_s"] = {"total": 0.397, "compute": 0.31, "communication": 0.048, "optimizer": 0.021, "host": 0.018}
    memory = {"total": 61.2, "parameters": 0.5, "gradients": 0.5, "optimizer": 1.0, "activations": 57.4, "other": 1.8}
    plan["memory_gib"] = memory | {"limit": 139.0, "reserve": 2.0}
    train, val = (next(line[k] for line in reversed(lines) if k in line) for k in ("loss", "val_loss"))
    summary = MODEL | {"status": status, "world_size": ranks, "steps": steps, "total_steps": steps, "unit": "tokens"}
    summary |= {
        "train_loss": train,
        "val_loss": val,
        "val_perplexity": math.exp(val),
        "tokens_per_s": 1.3e6,
        "mfu": 0.4,
    }
    summary |= {"peak_mem_gib": 60.5, "wall_s": 0.41 * steps, "device": "NVIDIA H200", "tokens_per_step": 524_288}
    summary |= {"parameters": 124_475_904, "mesh": {"dp": ranks}, "compile": "whole", "global_batch_size": 512}
    summary |= {"micro_batch_size": 32, "accumulation": 2}
    summary["predicted"] = {"tokens_per_s": 1.32e6, "memory_gib": 61.2, "step_s": 0.397, "mfu": 0.41}
    summary["ranks"] = [
        {"rank": r, "own_s": 0.36 + 0.03 * draw.random(), "data_s": 0.004, "wait_s": 0.02} for r in range(ranks)
    ]
    overrides = [f"optim.lr={lr:.4g}", f"model.num_layers={layers}", f"optim={optimizer}"]
    launch = {"id": f"{seed:032x}", "host": "node1", "cwd": "/home/user", "overrides": overrides}
    launch["launches"] = [{"time": "2026-09-21T14:13:20+0000", "overrides": overrides, "cluster": {"nodes": 1}}]
    for name, values in (("plan", plan), ("summary", summary), ("launch", launch)):
        (run_dir / f"{name}.json").write_text(json.dumps(values))
    (run_dir / "attempts.jsonl").write_text("".join(json.dumps(a) + "\n" for a in attempts(steps)))
    parts = {"matrix_products": 214.0, "attention": 51.0, "norms_and_elementwise": 38.2, "optimizer": 21.5}
    parts |= {"exposed_communication": 49.9, "copies": 6.1, "host_gaps": 14.8}
    profile = {"kind": "torch", "rank": 0, "parts": {k: {"ms": v} for k, v in parts.items()}}
    (run_dir / "profiles" / "rank-0.json").write_text(json.dumps(profile))
    config = {"model": {"num_layers": layers, "dim": 768}, "optim": {"lr": lr, "weight_decay": 0.1}, "name": "x"}
    config |= {"train": {"steps": steps, "seed": seed}, "choices": {"optim": optimizer, "strategy": "fsdp"}}
    (run_dir / "config.yaml").write_text(json.dumps(config))  # JSON is YAML
    (run_dir / "logs" / "system-node1.jsonl").write_text("".join(json.dumps(s) + "\n" for s in system(draw, steps)))
    return run_dir


def metrics(draw: random.Random, steps: int, ranks: int, lr: float, floor: float) -> Any:
    for step in range(1, steps + 1):
        rate = lr * min(1, 20 * step / steps) * (0.55 + 0.45 * math.cos(math.pi * step / steps))
        loss = floor + 8 * math.exp(-12 * step / steps) + 0.06 * draw.gauss(0, 1)
        loss += 1.5 if step == steps * 2 // 3 else 0.0  # a spike of one step
        seconds = 0.4 + 0.01 * abs(draw.gauss(0, 1)) + (0.25 if step % 500 == 0 else 0)
        line = {"step": step, "loss": loss, "lr": rate, "grad_norm": 0.4 + 3 / (1 + 50 * step / steps)}
        line["grad_norm"] += 0.05 * abs(draw.gauss(0, 1))
        line |= {"tokens": step * 524_288, "tokens_per_s": 524_288 / seconds, "step_s": seconds, "mfu": 0.164 / seconds}
        yield line | {"data_s": 0.002 + 0.001 * draw.random(), "mem_gib": 60.1 if step < 20 else 60.5}
        if step % max(1, steps // 40) == 0:
            yield {"step": step, "val_loss": loss + 0.05, "val_perplexity": math.exp(min(20, loss))}
        if step % max(1, steps // 100) == 0:
            slow = [0.15 if r == 5 and 0.4 < step / steps < 0.55 else 0.0 for r in range(ranks)]
            yield {"step": step, "rank_own_s": [0.36 + 0.01 * draw.random() + s for s in slow]}
        if step % max(1, steps // 10) == 0:
            yield {"step": step, "save_step": step, "save_s": 3.1}


def attempts(steps: int) -> Any:
    """Three starts: a preemption, a lost node and the end."""
    ends = [
        (0, steps // 3, 75, "preempted: SIGUSR1"),
        (steps // 3, steps * 3 // 5, 3, "rank 5: SIGKILL"),
        (steps * 3 // 5, steps, 0, "done"),
    ]
    now = START
    for first, last, code, why in ends:
        yield {"event": "start", "time": now, "step": first, "nodes": ["node1"]}
        now += 0.41 * (last - first) + 40
        yield {"event": "end", "time": now, "step": last, "code": code, "why": why}
        now += 0.02 * steps


def system(draw: random.Random, steps: int, every: int = 15) -> Any:
    for i in range(min(4000, int(0.41 * steps / every))):
        gpus = [
            {"index": g, "utilization_percent": 97 - 10 * draw.random(), "memory_gib": 62.0, "memory_total_gib": 140.4,
             "power_w": 640 + 40 * draw.random(), "power_limit_w": 700.0, "temperature_c": 60 + g + 3 * draw.random(),
             "sm_clock_mhz": 1755, "throttle": ["power cap"] if g == 3 and 50 < i < 60 else []}
            for g in range(8)
        ]  # fmt: skip
        sample = {"time": START + every * i, "cpu_percent": 12 + 5 * draw.random(), "memory_gib": 90 + draw.random()}
        yield sample | {
            "memory_total_gib": 2015.0,
            "net_in_mib_s": 3 * draw.random(),
            "disk_free_gib": 900.0,
            "gpus": gpus,
        }


def measure(page_file: Path, rounds: int) -> list[float]:
    """Milliseconds until the page can be used; a new browser profile each time."""
    from playwright.sync_api import sync_playwright

    found = []
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        for _ in range(rounds):
            page = browser.new_page(viewport={"width": 1440, "height": 900})
            page.goto(page_file.as_uri())
            page.wait_for_selector("html[data-ready]")  # wait_for_function needs eval, which the page forbids
            found.append(page.evaluate("performance.getEntriesByName('interactive')[0].startTime"))
            page.close()
        browser.close()
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    rows = []
    with tempfile.TemporaryDirectory() as name:
        for count in (1, 10, 50):
            folder = Path(name) / str(count)
            runs = [make_run(folder / f"run-{i:02}", seed=i) for i in range(count)]
            began = time.perf_counter()
            size = write(runs, folder / "report.html", f"{count} runs")
            row = {"runs": count, "steps": 10_000, "bytes": size, "write_s": round(time.perf_counter() - began, 2)}
            times = measure(folder / "report.html", options.rounds)
            row |= {"interactive_ms": round(statistics.median(times)), "interactive_max_ms": round(max(times))}
            row["load"] = round(os.getloadavg()[0], 1)  # a busy machine makes all times longer
            rows.append(row)
            print(row, flush=True)
    if options.json:
        content = {"benchmark": "report_page", **environment(), "rows": rows}
        options.json.write_text(json.dumps(content, indent=1) + "\n")


if __name__ == "__main__":
    main()
