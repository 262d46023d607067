"""Do trackers cost training anything when their servers are dead or hang? How fast is a long run sent later?

    python benchmarks/trackers.py steps [--pairs 150] [--phase 1] [--settle 60] [--json FILE]
    python benchmarks/trackers.py replay [--lines 1000000] [--trackers csv tensorboard …] [--json FILE]

steps: one launch of gpt2-tiny on one rank with all trackers, whose servers refuse the connection (dead), and one with
servers that accept it and never answer (hanging). After --settle seconds the follower and its children are stopped
(SIGSTOP: as if there were no tracker) and continued in phases of --phase seconds, in pairs of random order. Printed is
the median over the pairs of (median step while it runs / median step while it is stopped), with a bootstrapped 95%
interval, and the follower's CPU time: of its start (imports), and then in percent of a core.
replay: a run folder with so many lines as rank 0 writes them, sent by `dtrain log` to an empty tracker: seconds of the
whole command, its CPU seconds (with child processes), and lines a second. mlflow: its SQLite database; wandb: an
offline file.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks")]
TRACKERS = ("csv", "tensorboard", "trackio", "wandb", "mlflow")
SMALL = ["recipe=cpu-tiny", "cluster.processes=1", "train.eval_batches=0", "checkpoint.every=0"]
SMALL += ["model.dim=32", "model.num_heads=2", "model.num_layers=1", "train.global_batch_size=1"]


def follower_of(launcher: psutil.Process) -> psutil.Process:
    while launcher.is_running():
        for child in launcher.children(recursive=True):
            with suppress(psutil.Error):
                if "dtrain.loggers.follow" in child.cmdline():
                    return child
        time.sleep(0.1)
    raise SystemExit("the launch ended before its follower began")


class Cpu:
    """CPU seconds of a process and its children, also of those that have ended."""

    def __init__(self, process: psutil.Process) -> None:
        self.process, self.seen = process, dict[int, float]()

    def processes(self) -> list[psutil.Process]:
        return [self.process, *self.process.children(recursive=True)]

    def read(self) -> float:
        for process in self.processes():
            with suppress(psutil.Error):
                self.seen[process.pid] = sum(process.cpu_times()[:2])
        return sum(self.seen.values())

    def signal(self, number: signal.Signals) -> None:
        for process in self.processes():
            with suppress(psutil.Error):
                process.send_signal(number)


def phases_of_a_launch(folder: Path, kind: str, url: str, options: argparse.Namespace) -> dict[str, Any]:
    """Launch once; stop and continue the follower in turns; compare the steps."""
    run, pick = folder / kind, random.Random(0)
    loggers = ["logger=[csv,tensorboard,trackio,wandb,mlflow]", f"logger.mlflow.uri={url}"]
    loggers += [f"logger.trackio.server_url={url}"]
    servers = {"WANDB_BASE_URL": url, "WANDB_API_KEY": "0" * 40}
    servers |= {"TRACKIO_WRITE_TOKEN": "none", "TRACKIO_DIR": str(folder), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(ROOT / "launch.py"), *SMALL, "train.steps=10000000", f"run_dir={run}", *loggers]
    with open(folder / f"{kind}.log", "w") as log:
        launcher = psutil.Popen(command, env=os.environ | servers, cwd=folder, stdout=log, stderr=log)
    try:
        cpu = Cpu(follower_of(launcher))
        while launcher.is_running() and not (run / "metrics.jsonl").exists():
            time.sleep(0.1)
        time.sleep(options.settle)
        at_first, phases, running_s = cpu.read(), list[tuple[bool, float, float]](), 0.0
        for _ in range(options.pairs):
            for is_stopped in pick.sample([True, False], 2):
                cpu.signal(signal.SIGSTOP if is_stopped else signal.SIGCONT)
                began = time.time()
                time.sleep(options.phase)
                cpu.read()
                phases.append((is_stopped, began, time.time()))
                running_s += 0 if is_stopped else time.time() - began
        cpu.signal(signal.SIGCONT)
        steady = (cpu.read() - at_first) / running_s
    finally:
        launcher.send_signal(signal.SIGINT)
        time.sleep(2)
        launcher.send_signal(signal.SIGINT)  # the second one does not wait for the servers
        with suppress(psutil.TimeoutExpired):
            launcher.wait(60)
        for process in (launcher, cpu.process) if launcher.is_running() else ():  # on a machine that is much too busy
            process.kill()
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    steps = [(line["time"], line["step_s"]) for line in lines if "step_s" in line]
    medians = [(is_stopped, median_step(steps, began, ended)) for is_stopped, began, ended in phases]
    ratios = []
    for (first, a), (_, b) in zip(medians[::2], medians[1::2], strict=True):
        if a and b:
            ratios.append(b / a if first else a / b)
    if not ratios:
        raise SystemExit("no pair of phases has enough steps: the machine is too busy, or --phase is too short")
    draw = random.Random(1)
    drawn = sorted(statistics.median(draw.choices(ratios, k=len(ratios))) for _ in range(2000))
    return {
        "ratio": round(statistics.median(ratios), 5), "ratio_95": [round(drawn[50], 5), round(drawn[-51], 5)],
        "pairs": len(ratios), "phase_s": options.phase, "median_step_s": statistics.median(s for _, s in steps),
        "follower_cpu_s_at_first": round(at_first, 2), "first_s": options.settle,
        "follower_cpu_percent_then": round(100 * steady, 3), "load": os.getloadavg()[0],
    }  # fmt: skip


def median_step(steps: list[tuple[float, float]], began: float, ended: float) -> float | None:
    """Return the median of the steps that lie in a phase, without the one in which it began."""
    inside = [step_s for at, step_s in steps if began + step_s < at - step_s and at < ended]
    return statistics.median(inside) if len(inside) > 2 else None


def compare_steps(options: argparse.Namespace) -> dict[str, Any]:
    found = {}
    with tempfile.TemporaryDirectory() as name, socket.create_server(("127.0.0.1", 0), backlog=1000) as server:
        urls = {"dead": "http://127.0.0.1:9", "hanging": f"http://127.0.0.1:{server.getsockname()[1]}"}
        for kind in options.servers:
            of = found[kind] = phases_of_a_launch(Path(name), kind, urls[kind], options)
            low, high = of["ratio_95"]
            print(f"{kind} servers: step time × {of['ratio']:.4f} ({low:.4f} to {high:.4f}), {of['pairs']} pairs; "
                  f"follower: {of['follower_cpu_s_at_first']} s CPU in the first {options.settle:.0f} s, "
                  f"then {of['follower_cpu_percent_then']}% of a core", flush=True)  # fmt: skip
    return found


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
            began, before = time.perf_counter(), os.times()
            done = subprocess.run(
                [sys.executable, "-m", "dtrain", *words], env=environment, cwd=folder, capture_output=True, text=True
            )
            seconds, after = time.perf_counter() - began, os.times()
            cpu = sum(after[2:4]) - sum(before[2:4])
            if f"complete, {options.lines} rows were new" not in done.stdout:
                raise SystemExit(done.stdout + done.stderr)
            rate = round(options.lines / seconds)
            found[tracker] = {"seconds": round(seconds, 2), "cpu_s": round(cpu, 2), "lines_per_s": rate}
            found[tracker]["load"] = os.getloadavg()[0]
            print(f"{tracker}: {options.lines:,} lines in {seconds:.1f} s, {cpu:.1f} s CPU", flush=True)
    return {"lines": options.lines, "metrics_a_line": 8, "trackers": found}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["steps", "replay"])
    parser.add_argument("--pairs", type=int, default=150)
    parser.add_argument("--phase", type=float, default=1.0, help="seconds")
    parser.add_argument("--settle", type=float, default=60.0, help="seconds before the first phase: imports")
    parser.add_argument("--servers", nargs="+", choices=["dead", "hanging"], default=["dead", "hanging"])
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
