"""How long do 20 submissions take? As 20 commands and as one sweep, on a SLURM cluster of this machine.

    python benchmarks/submissions.py [--before FOLDER] [--rounds 3] [--json benchmarks/results/submissions-cpu.json]

FOLDER is a checkout of an older commit (git worktree add FOLDER COMMIT): both submit in turn, so that other load on the
machine hits both. Jobs are held, and no rank starts. Seconds are wall time and CPU time of the commands, sbatch
included; the cluster's own daemons are not in the CPU time. Root only, as the cluster is (tests/slurm.py).
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks")]
NUMBER = 20
TARGET_S = 15.0
JOB = ["model=gpt2-tiny", "cluster=slurm", "cluster.gpus_per_node=0", "cluster.nodes=2", "preflight=off",
       "+cluster.sbatch.hold=true"]  # fmt: skip
WAYS = {  # the commands of each way
    "commands": [[*JOB, f"train.seed={seed}", f"run_dir=run-{seed}"] for seed in range(NUMBER)],
    "sweep": [["-m", *JOB, f"train.seed=range({NUMBER})"]],
}


def submit(checkout: Path, commands: list[list[str]], env: dict[str, str]) -> tuple[float, float]:
    """Wall and CPU seconds of these commands, one after the other, in a new folder."""
    env = env | {"PYTHONPATH": str(checkout)}
    with tempfile.TemporaryDirectory() as folder:
        before, began = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
        for overrides in commands:
            command = [sys.executable, str(checkout / "launch.py"), *overrides]
            done = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True)
            assert done.returncode == 0, done.stdout + done.stderr
        wall, after = time.perf_counter() - began, resource.getrusage(resource.RUSAGE_CHILDREN)
        jobs = [p for p in Path(folder).rglob("launch.json") if "job_id" in p.read_text()]
        assert len(jobs) == NUMBER, f"{len(jobs)} runs have a job"
        subprocess.run(["scancel", "--user=root"], env=env, check=True)
    return wall, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def main() -> None:
    from throughput import environment

    from tests import slurm

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--before", type=Path, help="a checkout to compare with")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    if reason := slurm.available():
        sys.exit(f"error: no SLURM cluster can run here: {reason}")
    checkouts = {"before": options.before.resolve()} if options.before else {}
    checkouts["now"] = ROOT
    found: dict[tuple[str, str], list[tuple[float, float]]] = {}
    loads: list[float] = []
    # bytecode is kept, as Python does by default, but not in the checkouts
    with slurm.temporary(None) as cluster, tempfile.TemporaryDirectory() as bytecode:
        env = {k: v for k, v in os.environ.items() if k != "PYTHONDONTWRITEBYTECODE"}
        env |= {**cluster.env, "PYTHONPYCACHEPREFIX": bytecode}
        for checkout in checkouts.values():  # untimed: it writes the bytecode
            dry = [str(checkout / "launch.py"), *JOB, "run_dir=run", "dry_run=true"]
            subprocess.run([sys.executable, *dry], cwd=bytecode, env=env | {"PYTHONPATH": str(checkout)}, check=True,
                           stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)  # fmt: skip
        for _ in range(options.rounds):
            for way, commands in WAYS.items():
                for name, checkout in checkouts.items():
                    loads.append(os.getloadavg()[0])
                    found.setdefault((way, name), []).append(submit(checkout, commands, env))
                    wall, cpu = found[way, name][-1]
                    print(f"{way:10} {name:7} {wall:6.1f} s, {cpu:6.1f} of CPU (load {loads[-1]:.1f})", flush=True)
    rows: list[dict[str, Any]] = []
    for (way, name), seconds in found.items():
        row = {"way": way, "checkout": name, "submissions": NUMBER, "target_s": TARGET_S}
        row |= {"wall_s": [round(wall, 2) for wall, _ in seconds], "cpu_s": [round(cpu, 2) for _, cpu in seconds]}
        row |= {f"{key}_median": round(statistics.median(row[key]), 2) for key in ("wall_s", "cpu_s")}
        rows.append(row)
        print(f"{way:10} {name:7} median {row['wall_s_median']:6.1f} s, {row['cpu_s_median']:6.1f} of CPU")
    if options.json:
        commits = {name: _commit(checkout) for name, checkout in checkouts.items()}
        content = {"benchmark": "submissions", **environment(), "commits": commits, "load": [min(loads), max(loads)]}
        options.json.write_text(json.dumps(content | {"rows": rows}, indent=1) + "\n")


def _commit(checkout: Path) -> str:
    done = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=checkout, capture_output=True, text=True)
    return done.stdout.strip() or checkout.name


if __name__ == "__main__":
    main()
