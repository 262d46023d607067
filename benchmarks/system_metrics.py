"""What do system metrics and /metrics cost? CPU time of both processes, beside a run folder of a live run.

    python benchmarks/system_metrics.py [--seconds 120] [--json benchmarks/results/system-metrics-cpu.json]

The sampler runs as beside the ranks, once every 5 s, and once every 0.1 s for the cost of one sample. The server of
`dtrain metrics serve` is scraped once every 15 s, as in monitoring/prometheus.yml, and as often as it answers. CPU time
is the kernel's count for the process, without its start.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
import urllib.request
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.throughput import ROOT, environment
from dtrain.runs.protocol import free_port


def cpu_s(process: int) -> float:
    fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def share_of_a_core(process: int, seconds: float) -> float:
    before, began = cpu_s(process), time.monotonic()
    time.sleep(seconds)
    return (cpu_s(process) - before) / (time.monotonic() - began)


def sampler(run: Path, every: float, seconds: float) -> float:
    command = [sys.executable, "-m", "dtrain.runs.system", str(run), str(every), str(os.getpid())]
    process = subprocess.Popen(command, cwd=ROOT)
    try:
        time.sleep(3)
        return share_of_a_core(process.pid, seconds)
    finally:
        process.kill()
        process.wait()


def make_run(run: Path, lines: int) -> None:
    """A run whose files are as large as those of a day; this process is its launcher."""
    (run / "logs").mkdir()
    (run / "launch.json").write_text(json.dumps({"pid": os.getpid(), "host": os.uname().nodename, "launches": [{}]}))
    (run / "summary.json").write_text(json.dumps({"status": "running", "total_steps": lines, "world_size": 8}))
    step = {"loss": 2.51234567, "lr": 1e-3, "grad_norm": 0.51234567, "tokens_per_s": 1e6, "mfu": 0.41, "step_s": 0.25}
    with open(run / "metrics.jsonl", "w") as file:
        file.writelines(json.dumps({"step": i, **step}) + "\n" for i in range(lines))


def server(run: Path, seconds: float) -> tuple[float, float, float]:
    """(share of a core when scraped every 15 s, CPU seconds of a scrape, wall seconds of a scrape)."""
    port = free_port()
    command = [sys.executable, "-m", "dtrain", "metrics", "serve", str(run), f"--port={port}"]
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL)

    def scrape() -> None:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=30) as answer:
            assert b"dtrain_step" in answer.read()

    try:
        time.sleep(5)
        before, began, num = cpu_s(process.pid), time.monotonic(), 0
        while time.monotonic() - began < 10:
            scrape()
            num += 1
        each_cpu, each_wall = (cpu_s(process.pid) - before) / num, (time.monotonic() - began) / num
        before, began = cpu_s(process.pid), time.monotonic()
        while time.monotonic() - began < seconds:
            time.sleep(15)
            scrape()
        return (cpu_s(process.pid) - before) / (time.monotonic() - began), each_cpu, each_wall
    finally:
        process.kill()
        process.wait()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=120, help="of each measurement")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder)
        make_run(run, 300_000)
        often = sampler(run, 0.1, 20)
        rows = {
            "sampler, every 5 s, percent of a core": 100 * sampler(run, 5, options.seconds),
            "one sample, CPU ms": 1000 * often * 0.1,
        }
        scraped, cpu, wall = server(run, options.seconds)
        rows |= {
            "server, scraped every 15 s, percent of a core": 100 * scraped,
            "one scrape, CPU ms": 1000 * cpu,
            "one scrape, wall ms": 1000 * wall,
        }
    rows = {name: round(value, 4) for name, value in rows.items()}
    content = {"benchmark": "system_metrics", **environment(), "load_average": os.getloadavg()[0], "rows": rows}
    print(json.dumps(content, indent=1))
    if options.json:
        options.json.write_text(json.dumps(content, indent=1) + "\n")


if __name__ == "__main__":
    main()
