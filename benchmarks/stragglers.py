"""Is a slow rank named, rightly and soon, with the right slowdown? Is nobody named in a clean run? What does it cost?

    python benchmarks/stragglers.py --rounds 3 [--jobs 4] [--kinds quota sleep …] [--strategies ddp …] [--json FILE]
    python benchmarks/stragglers.py --clean 10 [--load 4] [--jobs 4] [--json FILE]
    python benchmarks/stragglers.py --cost [--rounds 15]

The first: real launches of gpt2-tiny, in each of which a random rank is slow from a random step on. quota, stop, busy:
it is held to half a core by a cgroup (needs root), by SIGSTOP and SIGCONT, or by another process on its core, so its
slowdown is 2. sleep: 0.2 s of sleep in its model at each step. data: 0.2 s in reading each batch. The second: all
strategies for so many minutes each, compiled, with evaluations and with saves to a slow disk, which take longer than
the limit for hangs, beside --load busy processes; also counts hangs that are reported. The third: turns of steps of
gpt2-tiny at batch 2 in one process with and without the watch, and the time of its parts as a share of a step.

With --jobs, each launch has its own cores, if there are enough: as many as ranks, or one more.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import SimpleQueue
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks"), str(ROOT / "benchmarks" / "planner")]
KINDS = ("quota", "stop", "busy", "sleep", "data")
LAYOUTS = {"ddp": (3, 1), "fsdp": (3, 1), "tensor": (2, 1), "pipeline": (2, 8)}  # ranks, calls of the model per step
PERIOD_S = 0.1
SLOW = """
import os, time
from dtrain.data.synthetic import Synthetic
from dtrain.models.gpt2 import GPT2

if os.environ.get("DISK_S"):  # a slow disk
    fsync = os.fsync
    os.fsync = lambda file: (time.sleep(float(os.environ["DISK_S"])), fsync(file))

def due(kind, calls):
    return os.environ["HOW"] == kind and os.environ["RANK"] == os.environ["WHO"] and calls > int(os.environ["AT"])

class Model(GPT2):
    calls = 0
    def forward(self, inputs, targets=None):
        Model.calls += self.training
        if self.training and due("sleep", Model.calls / int(os.environ["CALLS"])):
            time.sleep(float(os.environ["SLEEP"]) / int(os.environ["CALLS"]))
        return super().forward(inputs, targets)

class Data(Synthetic):
    def dataset(self, split):
        found = super().dataset(split)
        batch, calls = found.batch, [0]
        def slow(indices):
            calls[0] += len(indices) > 1
            if due("data", calls[0]):
                time.sleep(float(os.environ["SLEEP"]))
            return batch(indices)
        found.batch = slow
        return found
"""


class Launch:
    """One launch of gpt2-tiny, on its own cores if it gets some."""

    def __init__(self, folder: Path, strategy: str, cores: list[int], env: dict[str, str], *overrides: str) -> None:
        self.run, self.cores = folder / "run", cores
        self.ranks, _ = LAYOUTS[strategy]
        (folder / "slow.py").write_text(SLOW)
        command = [sys.executable, str(ROOT / "launch.py"), "run_dir=run", "model=gpt2-tiny", "data=synthetic"]
        command += ["model._target_=slow.Model", "data._target_=slow.Data", "trust=[slow]", f"strategy={strategy}"]
        command += [f"cluster.processes={self.ranks}", "train.log_every=1", *overrides]
        defaults = {"OMP_NUM_THREADS": "1", "HOW": "", "WHO": "-1", "AT": "0", "CALLS": "1"}
        with open(folder / "screen", "w") as screen:
            self.process = subprocess.Popen(
                command, cwd=folder, env=os.environ | defaults | env, stdout=screen, stderr=screen,
                preexec_fn=(lambda: os.sched_setaffinity(0, cores)) if cores else None,
            )  # fmt: skip

    def rows(self) -> list[dict[str, Any]]:
        """Complete lines of metrics.jsonl."""
        path = self.run / "metrics.jsonl"
        lines = path.read_text().splitlines(keepends=True) if path.exists() else []
        return [json.loads(line) for line in lines if line.endswith("}\n")]

    def step(self) -> int:
        return max((row["step"] for row in self.rows()), default=0)

    def pid(self, rank: int) -> int:
        return int(json.loads((self.run / "logs" / f"position-{rank}.json").read_text())["pid"])


@contextlib.contextmanager
def held(kind: str, pid: int, core: int | None) -> Iterator[None]:
    """Hold a process to half a core."""
    ended = threading.Event()
    if kind == "quota":
        with tempfile.TemporaryDirectory(dir=cgroup_root(), prefix="dtrain-slow-", ignore_cleanup_errors=True) as group:
            period, half = round(PERIOD_S * 1e6), round(PERIOD_S * 5e5)
            version_1 = Path(group) / "cpu.cfs_quota_us"
            if version_1.exists():
                version_1.write_text(str(half))
            else:
                (Path(group) / "cpu.max").write_text(f"{half} {period}")
            (Path(group) / "cgroup.procs").write_text(str(pid))
            yield
        with contextlib.suppress(OSError):
            os.rmdir(group)  # its files cannot be deleted, but it can
        return
    if kind == "stop":

        def stop_and_continue() -> None:
            with contextlib.suppress(ProcessLookupError):
                while not ended.wait(PERIOD_S / 2):
                    os.kill(pid, signal.SIGSTOP)
                    ended.wait(PERIOD_S / 2)
                    os.kill(pid, signal.SIGCONT)

        threading.Thread(target=stop_and_continue, daemon=True).start()
    busy = None
    if kind == "busy":
        assert core is not None
        for task in os.listdir(f"/proc/{pid}/task"):
            os.sched_setaffinity(int(task), {core})
        loop = [sys.executable, "-c", f"import os\nos.sched_setaffinity(0, {{{core}}})\nwhile True: pass"]
        busy = subprocess.Popen(loop)
    try:
        yield
    finally:
        ended.set()
        if busy:
            busy.kill()
            busy.wait()


def cgroup_root() -> Path | None:
    """Where a cgroup with a CPU quota can be made; None: nowhere."""
    for root in (Path("/sys/fs/cgroup/cpu"), Path("/sys/fs/cgroup")):
        name = "cpu.cfs_quota_us" if root.name == "cpu" else "cpu.max"
        with contextlib.suppress(OSError), tempfile.TemporaryDirectory(dir=root, ignore_cleanup_errors=True) as group:
            works = (Path(group) / name).exists()
            os.rmdir(group)
            if works:
                return root
    return None


def one(
    kind: str, strategy: str, who: int, at: int, steps: int, sleep_s: float, batch: int, cores: list[int]
) -> dict[str, Any]:
    """One launch with a slow rank."""
    ranks, calls = LAYOUTS[strategy]
    env = {"HOW": kind, "WHO": str(who), "AT": str(at), "CALLS": str(calls), "SLEEP": str(sleep_s)}
    settings = [f"train.steps={at + steps}", f"train.global_batch_size={batch}", "checkpoint.every=0"]
    settings += ["train.eval_batches=0", "train.eval_every=0"]
    with tempfile.TemporaryDirectory() as name:
        launch = Launch(Path(name), strategy, cores, env, *settings)
        from_step = at
        if kind in ("quota", "stop", "busy"):
            while launch.process.poll() is None and launch.step() < at:
                time.sleep(0.02)
            core = cores[who] if cores else who % (os.cpu_count() or 1)
            with held(kind, launch.pid(who), core):
                from_step = launch.step()
                launch.process.wait()
        code = launch.process.wait()
        rows = launch.rows()
        if code:
            print((Path(name) / "screen").read_text()[-3000:], file=sys.stderr)
        summary = json.loads((launch.run / "summary.json").read_text())
    before = statistics.median(row["step_s"] for row in rows if "step_s" in row and 5 < row["step"] <= from_step)
    after = statistics.median(row["step_s"] for row in rows if "step_s" in row and row["step"] > from_step + 2)
    named = [row for row in rows if "slow_rank" in row]
    first = next((row for row in named if row["slow_rank"] == who and row["step"] >= from_step), None)
    final = next((slow["slowdown"] for slow in summary["slow_ranks"] if slow["rank"] == who), None)
    own = statistics.median(r["own_s"] for r in summary["ranks"] if r["rank"] != who) if summary["ranks"] else 0
    extra = {"sleep": sleep_s, "data": after - own}.get(kind, own)
    truth = (own + extra) / own
    return {
        "kind": kind, "strategy": strategy, "ranks": ranks, "who": who, "from_step": from_step,
        "named": sorted({row["slow_rank"] for row in named}), "right": {row["slow_rank"] for row in named} == {who},
        "after_steps": first["step"] - from_step if first else None, "cause": first["slow_cause"] if first else None,
        "slowdown_first": first["slowdown"] if first else None, "slowdown": final, "truth": truth,
        "error": final / truth - 1 if final else None, "step_ms": [before * 1e3, after * 1e3],
        "own_ms": [rank["own_s"] * 1e3 for rank in summary["ranks"]], "exit_code": code,
    }  # fmt: skip


def clean(strategy: str, minutes: float, batch: int, hang_timeout: str, cores: list[int]) -> dict[str, Any]:
    """One launch in which all ranks are alike."""
    from dtrain.runs.protocol import STOP_FILE

    settings = ["train.steps=1000000", f"train.global_batch_size={batch}", "train.eval_every=50"]
    settings += ["train.eval_batches=8", "checkpoint.every=200", "checkpoint.background=false", "compile=blocks"]
    settings += [f"cluster.hang_timeout={hang_timeout}"]
    with tempfile.TemporaryDirectory() as name:
        launch = Launch(Path(name), strategy, cores, {"DISK_S": "2"}, *settings)
        while launch.process.poll() is None and not launch.rows():
            time.sleep(0.1)
        with contextlib.suppress(subprocess.TimeoutExpired):
            launch.process.wait(60 * minutes)
        (launch.run / STOP_FILE).touch()
        code, rows = launch.process.wait(), launch.rows()
        summary = json.loads((launch.run / "summary.json").read_text())
        screen = (Path(name) / "screen").read_text()
    return {
        "strategy": strategy, "minutes": minutes, "steps": rows[-1]["step"], "exit_code": code,
        "saves_s": [row["save_s"] for row in rows if "save_s" in row][:3],
        "hangs": [line for line in screen.splitlines() if "no progress for" in line],
        "named": [row["slow_text"] for row in rows if "slow_text" in row], "ranks": summary["ranks"],
    }  # fmt: skip


def cost(rounds: int) -> dict[str, Any]:
    """The share of a step that measuring and judging takes, on rank 0 of 4."""
    import numpy as np
    import torch
    import torch.distributed as dist
    from measure import batch_of
    from replicas import set_up

    from dtrain.config.run_file import Settings
    from dtrain.launch.compose import compose
    from dtrain.train import process
    from dtrain.train.rank_times import RankTimes
    from dtrain.train.straggler_judge import Judge
    from dtrain.train.stragglers import WINDOW_STEPS

    os.environ |= {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29518"}
    torch.set_num_threads(1)
    device = process.join_process_group()
    cfg = Settings(compose(["model=gpt2-tiny", "train.global_batch_size=2"]))
    strategy, batch, judge = set_up(cfg, device), batch_of(cfg, 2, device), Judge([0] * 4)

    def window(times: RankTimes) -> None:
        judge.add(0, WINDOW_STEPS, np.array([times.take()] * 4))

    def steps(times: RankTimes | None, count: int = 60) -> tuple[float, float]:
        """Wall and CPU time of a step."""
        began, cpu_began = time.perf_counter(), time.thread_time()
        for step in range(count):
            if times:
                times.start_step()
            strategy.train_step(*batch).read()
            if times:
                times.end_step(0.0)
                if step % WINDOW_STEPS == 0:
                    window(times)
        return (time.perf_counter() - began) / count, (time.thread_time() - cpu_began) / count

    def each_us(function: Any, count: int) -> float:
        """CPU time, the least of 5 turns: on a busy machine, other processes are in the wall time."""
        turns = []
        for _ in range(5):
            began = time.thread_time()
            for _ in range(count):
                function()
            turns.append((time.thread_time() - began) / count * 1e6)
        return min(turns)

    steps(None)
    with_it, without, sampler = [], [], []
    for turn in range(2 * rounds):
        if turn % 4 in (1, 2):  # each is first as often as second
            times = RankTimes()
            began = time.perf_counter()
            with_it.append(steps(times))
            sampler.append(thread_cpu_s(times._sampler) / (time.perf_counter() - began))
            times.end()
        else:
            without.append(steps(None))
    times = RankTimes()
    times.end()
    step_us = each_us(lambda: (times.start_step(), times.end_step(0.0)), 10_000)
    window_us = each_us(lambda: window(times), 2_000)
    dist.destroy_process_group()
    (wall, cpu), (wall_with, cpu_with) = (np.median(some, axis=0).tolist() for some in (without, with_it))
    share = statistics.median(sampler)
    return {
        "step_ms": wall * 1e3, "step_cpu_ms": cpu * 1e3, "ratio": wall_with / wall, "cpu_ratio": cpu_with / cpu,
        "step_us": step_us, "window_us": window_us, "sampler_share": share,
        "computed_share": (step_us + window_us / WINDOW_STEPS) * 1e-6 / cpu + share,
    }  # fmt: skip


def thread_cpu_s(thread: int) -> float:
    return int(Path(f"/proc/self/task/{thread}/schedstat").read_text().split()[0]) * 1e-9


def main() -> None:
    from throughput import environment

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--kinds", nargs="+", default=list(KINDS), choices=KINDS)
    parser.add_argument("--strategies", nargs="+", default=list(LAYOUTS), choices=list(LAYOUTS))
    parser.add_argument("--ranks", type=int, help="of ddp and fsdp, instead of 3")
    parser.add_argument("--batch", type=int, default=24, help="global batch size")
    parser.add_argument("--sleep", type=float, default=0.2, help="seconds a step, of sleep and data")
    parser.add_argument("--steps", type=int, default=60, help="after the rank became slow")
    parser.add_argument("--jobs", type=int, default=1, help="launches at a time")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--clean", type=float, help="minutes per strategy")
    parser.add_argument("--hang-timeout", default="5", help="cluster.hang_timeout of clean runs")
    parser.add_argument("--load", type=int, default=0, help="busy processes beside clean runs")
    parser.add_argument("--cost", action="store_true")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    if options.ranks:
        LAYOUTS.update({name: (options.ranks, 1) for name in ("ddp", "fsdp")})
    if "quota" in options.kinds and cgroup_root() is None:
        print("no cgroup can be made here: quota is left out")
        options.kinds.remove("quota")
    rows = [cost(options.rounds)] if options.cost else launches(options)
    if options.cost:
        print(rows[0])
    elif options.clean:
        named, hangs = (sum(len(row[what]) for row in rows) for what in ("named", "hangs"))
        print(f"{named} named and {hangs} hangs reported in {sum(row['minutes'] for row in rows)} minutes")
    else:
        print_found(rows)
    if options.json:
        options.json.write_text(json.dumps({"benchmark": "stragglers", **environment(), "rows": rows}, indent=1) + "\n")


def launches(options: argparse.Namespace) -> list[dict[str, Any]]:
    """All launches, some at a time. Each has its own cores while it runs, if there are enough."""
    most, cpus = max(LAYOUTS[name][0] for name in options.strategies), sorted(os.sched_getaffinity(0))
    most += most % 2  # neighbours are often the two threads of one core
    free: SimpleQueue[list[int]] = SimpleQueue()
    for job in range(options.jobs):
        free.put(cpus[job * most : (job + 1) * most] if options.jobs * most <= len(cpus) and not options.load else [])
    draw = random.Random(options.seed)

    def in_turn(function: Any, *arguments: Any) -> dict[str, Any]:
        cores = free.get()
        try:
            found: dict[str, Any] = function(*arguments, cores)
        finally:
            free.put(cores)
        print(json.dumps({key: value for key, value in found.items() if key != "ranks" or options.clean}), flush=True)
        return found

    busy = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(options.load)]
    with ThreadPoolExecutor(options.jobs) as pool:
        jobs = []
        for _ in range(1 if options.clean else options.rounds):
            for strategy in options.strategies:
                if options.clean:
                    settings = strategy, options.clean, options.batch, options.hang_timeout
                    jobs.append(pool.submit(in_turn, clean, *settings))
                for kind in [] if options.clean else options.kinds:
                    who, at = draw.randrange(LAYOUTS[strategy][0]), draw.randrange(20, 40)
                    jobs.append(
                        pool.submit(in_turn, one, kind, strategy, who, at, options.steps, options.sleep, options.batch)
                    )
        rows = [job.result() for job in jobs]
    for process in busy:
        process.kill()
    return rows


def print_found(rows: list[dict[str, Any]]) -> None:
    for kind in dict.fromkeys(row["kind"] for row in rows):
        of_kind = [row for row in rows if row["kind"] == kind]
        after = [row["after_steps"] for row in of_kind if row["after_steps"] is not None]
        errors = [abs(row["error"]) for row in of_kind if row["error"] is not None]
        print(
            f"{kind}: {sum(row['right'] for row in of_kind)} of {len(of_kind)} rightly named, "
            f"{sum(steps <= 30 for steps in after)} within 30 steps (latest {max(after, default=0)}), "
            f"{sum(error <= 0.15 for error in errors)} slowdowns within 15% (median error "
            f"{statistics.median(errors or [0]):.1%}, largest {max(errors, default=0):.1%})"
        )


if __name__ == "__main__":
    main()
