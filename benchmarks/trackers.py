"""Do trackers cost training anything when their servers are dead or hang? How fast is a long run sent later?

    python benchmarks/trackers.py steps [--rounds 7] [--steps 400] [--skip 100] [--json FILE]
    python benchmarks/trackers.py replay [--lines 1000000] [--trackers csv tensorboard …] [--json FILE]

steps: launches of gpt2-tiny on one rank, in turns: without a tracker, with all trackers whose servers refuse the
connection, and with servers that accept it and never answer. Each launch gives the median step after the first --skip;
printed is the median over the rounds of the ratio to the launch without trackers of the same round.
replay: a run folder with so many lines as rank 0 writes them, sent by `dtrain log` to an empty tracker: seconds of the
whole command, and lines a second. mlflow: its SQLite database; wandb: an offline file.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks")]
TRACKERS = ("csv", "tensorboard", "trackio", "wandb", "mlflow")
SMALL = ["recipe=cpu-tiny", "cluster.processes=1", "train.eval_batches=0", "checkpoint.every=0"]
SMALL += ["model.dim=64", "model.num_heads=2", "train.global_batch_size=8"]


def launch(folder: Path, kind: str, url: str, steps: int) -> list[float]:
    """Return the step times of one launch."""
    run = folder / f"{kind}-{time.monotonic_ns()}"
    loggers = ["logger=none"]
    if kind != "none":
        loggers = ["logger=[csv,tensorboard,trackio,wandb,mlflow]", f"logger.mlflow.uri={url}"]
        loggers += [f"logger.trackio.server_url={url}"]
    servers = {"WANDB_BASE_URL": url, "WANDB_API_KEY": "0" * 40}
    servers |= {"TRACKIO_WRITE_TOKEN": "none", "TRACKIO_DIR": str(folder)}
    command = [sys.executable, str(ROOT / "launch.py"), *SMALL, f"train.steps={steps}", f"run_dir={run}", *loggers]
    done = subprocess.run(command, env=os.environ | servers, cwd=folder, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(done.stdout + done.stderr)
    for line in done.stdout.splitlines():
        if "did not get all metrics" in line:
            print(f"  {kind}: {line[:150]}", flush=True)
    lines = (run / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line)["step_s"] for line in lines if '"step_s"' in line]


def compare_steps(options: argparse.Namespace) -> dict[str, Any]:
    medians: dict[str, list[float]] = {"none": [], "dead": [], "hanging": []}
    with tempfile.TemporaryDirectory() as name, socket.create_server(("127.0.0.1", 0), backlog=1000) as server:
        urls = {"none": "", "dead": "http://127.0.0.1:9", "hanging": f"http://127.0.0.1:{server.getsockname()[1]}"}
        for i in range(options.rounds):
            for kind in random.Random(i).sample(list(medians), len(medians)):
                times = launch(Path(name), kind, urls[kind], options.steps)
                medians[kind].append(statistics.median(times[options.skip :]))
                print(f"round {i + 1}: {kind} {1000 * medians[kind][-1]:.3f} ms", flush=True)
    ratios = {
        kind: statistics.median(a / b for a, b in zip(medians[kind], medians["none"], strict=True))
        for kind in ("dead", "hanging")
    }
    for kind, ratio in ratios.items():
        print(f"{kind} servers: step time × {ratio:.4f}")
    return {"median_step_s": medians, "ratio": ratios}


def make_run(folder: Path, lines: int) -> None:
    """A run folder as the ranks leave it."""
    (folder / "logs").mkdir(parents=True)
    config = {"name": "long", "train": {"steps": lines}, "logger": {}, "choices": {"model": "gpt2-tiny"}}
    (folder / "config.yaml").write_text(json.dumps(config))
    launched = {"id": "0123456789abcdef", "command": "dtrain launch", "launches": [{"time": "2026-11-14T10:00:00"}]}
    (folder / "launch.json").write_text(json.dumps(launched))
    (folder / "summary.json").write_text(json.dumps({"status": "done", "steps": lines}))
    draw = random.Random(0).random
    with open(folder / "metrics.jsonl", "w") as file:
        for step in range(1, lines + 1):
            line = {"step": step, "loss": 2 + draw(), "lr": 1e-3 * draw(), "grad_norm": draw(), "tokens": 4096 * step,
                    "tokens_per_s": 1e4 * draw(), "step_s": draw(), "data_s": draw() / 100, "mfu": None,
                    "mem_gib": 0.4344940185546875, "time": round(1.7e9 + step / 3, 3)}  # fmt: skip
            file.write(json.dumps(line) + "\n")


def replay(options: argparse.Namespace) -> dict[str, Any]:
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        make_run(folder / "run", options.lines)
        uri = f"sqlite:///{folder}/mlflow.db"
        settings = {"mlflow": [f"logger.mlflow.uri={uri}"], "wandb": ["logger.wandb.mode=offline"]}
        if "mlflow" in options.trackers:  # the database is there before, as a server's is
            make = f"from mlflow.tracking import MlflowClient; MlflowClient({uri!r}).search_experiments()"
            subprocess.run([sys.executable, "-c", make], check=True, capture_output=True)
        environment = os.environ | {"PYTHONPATH": str(ROOT), "TRACKIO_DIR": str(folder / "trackio")}
        for tracker in options.trackers:
            words = ["log", str(folder / "run"), f"logger={tracker}", *settings.get(tracker, [])]
            began = time.perf_counter()
            done = subprocess.run(
                [sys.executable, "-m", "dtrain", *words], env=environment, cwd=folder, capture_output=True, text=True
            )
            seconds = time.perf_counter() - began
            if f"complete, {options.lines} rows were new" not in done.stdout:
                raise SystemExit(done.stdout + done.stderr)
            found[tracker] = {"seconds": round(seconds, 2), "lines_per_s": round(options.lines / seconds)}
            print(f"{tracker}: {options.lines:,} lines in {seconds:.1f} s", flush=True)
    return {"lines": options.lines, "metrics_a_line": 8, "trackers": found}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["steps", "replay"])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--skip", type=int, default=100, help="steps that are not counted: the libraries are imported")
    parser.add_argument("--lines", type=int, default=1_000_000)
    parser.add_argument("--trackers", nargs="+", choices=TRACKERS, default=list(TRACKERS))
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    result = (compare_steps if options.what == "steps" else replay)(options)
    if options.json:
        from throughput import environment

        before = json.loads(options.json.read_text()) if options.json.exists() else {}
        options.json.write_text(json.dumps({**before, **environment(), options.what: result}, indent=1) + "\n")


if __name__ == "__main__":
    main()
