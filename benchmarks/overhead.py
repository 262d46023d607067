"""What does dtrain cost over a hand-written DDP script? A step, the loop, the launcher, the time to the first step.

    python benchmarks/overhead.py [--rounds 60] [--steps 3] [--quick] [--json FILE]

1. Step: `python launch.py` (supervisor, progress display, stop votes, metrics: all of it) against
   handwritten.py, on gpt2-tiny with two processes. Three worlds are alive at once, ours and the peer twice, and
   exactly one runs at a time: each waits before a step until it is told to do its next block of steps. So blocks
   that are compared lie a second apart, and load that comes and goes hits all three. A step is timed from its
   start to the start of the next, logging included; the first of a block is not counted. A round is one block of
   each world; "peer" is the mean of the two. The figure is the median over the rounds, its range a 95% interval of
   that median; the control, peer against peer, shows the noise.
   Batch 32 is the real case. At batch 2 a step is a tenth as long, so what dtrain adds to each step shows ten
   times larger. The third comparison, "estimated", has far less noise than the first and must agree with it: the
   milliseconds a step found at batch 2, laid on the peer's step of batch 32, and the whole CPU time of our
   supervisor, which grows with time and not with steps, as if no core were free for it.
   accelerate and Lightning, where they are installed, train the same in worlds of their own (with_tools.py).
2. The loop alone: both sides with a step that computes nothing (empty_step.py says what is counted and why), for one
   and two processes, in turn. The figure is the time between two steps, by the wall and by the CPU time of the main
   thread, and where ours goes. The target is for the CPU time of our loop, all of it, and for the wall time that it
   adds to the hand-written one's: that has to read its batch meanwhile, ours has a thread for it.
3. `python launch.py dry_run=true` and `dtrain plan` against `python -c "import torch"`: wall time of the process.
   Also the loop with a hook that does nothing, beside hooks=none: unused hooks cost nothing.
4. Process start to the line of the first step (metrics.jsonl, and the script's print), looked for every 5 ms: ddp on
   two ranks, and 3d on four beside the hand-written ddp on four; and the CPU time of the whole launch of one step. Both
   sides have Python's bytecode of all packages, as after a usual `pip install`.

Nothing here passes or fails: it prints both columns beside the target.
"""

from __future__ import annotations

import argparse
import atexit
import contextlib
import importlib.metadata
import importlib.util
import json
import math
import os
import platform
import resource
import shutil
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NoReturn

from dtrain import __version__
from dtrain.optim import schedule

ROOT = Path(__file__).resolve().parent.parent
PROCESSES = 2
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={PROCESSES}"]
TOOLS = ("accelerate", "lightning")
INSTALLED = tuple(tool for tool in TOOLS if importlib.util.find_spec(tool))
WORLDS = ("ours", "peer", "control", *INSTALLED)
WARMUP_ROUNDS = 2
ROUNDS_A_LAUNCH = 30  # then all worlds start anew: where a process happens to lie in memory matters too
STEP, LOOP, DRY_RUN = 1.01, 100e-6, 0.5  # the targets: ratio, seconds, ratio
START = {("ddp", 2): 5.0, ("3d", 4): 10.0}  # strategy and ranks → seconds to the first step, on two idle cores
LOOP_STEPS, LOOP_LAUNCHES = 1000, 3
HOOK_LAUNCHES = 7

Row = dict[str, Any]
Blocks = dict[str, list[float]]  # of each world, the median step of each block, in seconds


# ---- inside a rank: hold the loop before a step, and time the steps ----------------------------------------


class Gate:
    """Called before each step: waits until told, lets `block` steps pass, reports their times, waits again."""

    def __init__(self, address: str, block: int) -> None:
        self.block, self.due = block, 1  # the first call waits at once
        self.marks: list[tuple[float, float]] = []
        channel = socket.socket(socket.AF_UNIX)
        channel.connect(address)
        self.lines = channel.makefile("rw")

    def __call__(self) -> None:
        self.marks.append((time.perf_counter(), time.process_time()))
        if len(self.marks) < self.due:
            return
        steps = [(b[0] - a[0], b[1] - a[1]) for a, b in zip(self.marks, self.marks[1:], strict=False)]
        self.lines.write(json.dumps({"rank": int(os.environ["RANK"]), "steps": steps}) + "\n")
        self.lines.flush()
        if not self.lines.readline():  # the benchmark is gone
            os._exit(1)
        self.marks, self.due = [(time.perf_counter(), time.process_time())], self.block + 1


class GatedCosine:
    """schedule=cosine with a gate: every rank asks for its rate once a step, so that is where to hold the loop."""

    def __init__(self, warmup_steps: int, min_ratio: float, address: str, block: int, steps: int = 0) -> None:
        self.steps, self.warmup_steps, self.min_ratio = steps, warmup_steps, min_ratio
        self.gate = Gate(address, block)

    def __call__(self, step: int) -> float:
        self.gate()
        return schedule.cosine(step, self.steps, self.warmup_steps, self.min_ratio)


# ---- outside: worlds that run in turn ----------------------------------------------------------------------


class World:
    """One training on a terminal of its own, that runs a block of steps when told and else waits."""

    def __init__(self, folder: Path, name: str, batch: int, block: int, steps: int) -> None:
        self.name, self.is_ours, self.output = name, name == "ours", b""
        self.busy = self.ran = 0.0  # seconds: CPU of our supervisor, and wall, over all blocks
        self.ranks: list[Any] = []
        address = str(folder / f"{name}.sock")
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(address)
            listener.listen()
            listener.settimeout(0.5)
            if self.is_ours:
                command = [sys.executable, "launch.py", *our_settings(folder, address, batch, block, steps)]
            else:
                gated = ["-m", "benchmarks.overhead", "--gated-peer", name, address, str(block)]
                command = [*TORCHRUN, *gated, "--batch", str(batch), "--steps", str(steps)]
            self.screen, terminal = os.openpty()
            self.process = subprocess.Popen(
                command, cwd=ROOT, env=environment(), stdin=subprocess.DEVNULL, stdout=terminal, stderr=terminal
            )
            os.close(terminal)
            threading.Thread(target=self._read_screen, daemon=True).start()
            while len(self.ranks) < PROCESSES:
                try:
                    self.ranks.append(listener.accept()[0].makefile("rw"))
                except TimeoutError:
                    if self.process.poll() is not None:
                        self._fail()
        self._wait()  # now every rank is before its first step

    def run_block(self) -> list[tuple[float, float]]:
        """(wall, CPU) seconds of rank 0's steps."""
        busy, began = cpu_seconds(self.process.pid), time.perf_counter()
        self._go()
        steps = self._wait()
        self.ran += time.perf_counter() - began
        self.busy += cpu_seconds(self.process.pid) - busy
        return steps

    def finish(self) -> None:
        """Let the last step, and what follows it, happen."""
        self._go()
        if self.is_ours:
            if self.process.wait(timeout=300):
                self._fail()
            return
        # All is measured by now, and gloo aborts or hangs at times while a plain script exits: no reason to stop.
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(timeout=30)
        self.kill()

    def kill(self) -> None:
        if self.process.poll() is None:
            self.process.kill()  # our ranks die with it; the peer's find their gate gone
            self.process.wait()
        for rank in self.ranks:
            rank.close()

    def _go(self) -> None:
        if self.is_ours:
            self.process.send_signal(signal.SIGCONT)
        for rank in self.ranks:
            rank.write("go\n")
            rank.flush()

    def _wait(self) -> list[tuple[float, float]]:
        lines = [rank.readline() for rank in self.ranks]
        if not all(lines):
            self._fail()
        if self.is_ours:  # our supervisor may only slow down our own steps; torchrun's is there in all worlds
            self.process.send_signal(signal.SIGSTOP)
        return next(m["steps"] for m in map(json.loads, lines) if m["rank"] == 0)

    def _read_screen(self) -> None:
        with contextlib.suppress(OSError):  # the other end has closed
            while data := os.read(self.screen, 65536):
                self.output = (self.output + data)[-4000:]
        os.close(self.screen)

    def _fail(self) -> NoReturn:
        self.kill()
        raise RuntimeError(f"the world {self.name!r} ended early:\n{self.output.decode(errors='replace')}")


def cpu_seconds(pid: int) -> float:
    """CPU time of a process's main thread so far; Linux alone tells, elsewhere it counts as none."""
    path = Path(f"/proc/{pid}/schedstat")
    return int(path.read_text().split()[0]) / 1e9 if path.exists() else 0.0


def our_settings(folder: Path, address: str, batch: int, block: int, steps: int) -> list[str]:
    gate = ["schedule._target_=benchmarks.overhead.GatedCosine", "schedule._partial_=false"]
    gate += [f"+schedule.address={address}", f"+schedule.block={block}"]
    return [
        *("strategy=ddp", "model=gpt2-tiny", f"cluster.processes={PROCESSES}", f"run_dir={folder / 'run'}"),
        *(f"train.global_batch_size={batch}", f"train.steps={steps}", "train.eval_batches=0"),
        *("checkpoint.every=0", "trust=[benchmarks]", *gate),
    ]


def environment(processes: int = PROCESSES) -> dict[str, str]:
    """The same for both sides; as many threads as cluster=local would give."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    same = {"OMP_NUM_THREADS": str(max(1, cores // processes)), "PYTHONPATH": str(ROOT)}
    return os.environ | same | {"TERM": "xterm-256color", "COLUMNS": "120"}


# ---- the comparisons ---------------------------------------------------------------------------------


def time_steps(rounds: int, block: int, batch: int) -> tuple[Blocks, Blocks, float]:
    """Wall and CPU time of a step, for each world, and the share of a core that our supervisor takes."""
    busy = ran = 0.0
    wall: Blocks = {name: [] for name in WORLDS}
    cpu: Blocks = {name: [] for name in WORLDS}
    launches = math.ceil(rounds / ROUNDS_A_LAUNCH)
    for launch in range(launches):
        num_rounds = len(range(launch, rounds, launches))
        steps = (WARMUP_ROUNDS + num_rounds) * (block + 1) + 1  # the last one ends the world
        with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
            worlds = []
            for name in WORLDS:
                worlds.append(World(Path(folder), name, batch, block + 1, steps))
                stack.callback(worlds[-1].kill)
            for i in range(-WARMUP_ROUNDS, num_rounds):
                say(f"batch {batch}: launch {launch + 1}/{launches}, round {max(0, i + 1)}/{num_rounds}")
                order = [worlds[(i // 2 + k) % len(worlds)] for k in range(len(worlds))]  # each is first in turn
                for world in order if i % 2 else reversed(order):
                    timed = world.run_block()[1:]
                    if i >= 0:
                        wall[world.name].append(statistics.median(w for w, _ in timed))
                        cpu[world.name].append(statistics.median(c for _, c in timed))
            busy, ran = busy + worlds[0].busy, ran + worlds[0].ran
            for world in worlds:
                world.finish()
    return wall, cpu, busy / ran


def compare_steps(rounds: int, block: int) -> list[Row]:
    rows, found = [], {}
    for batch, n, steps in ((32, rounds, block), (2, 2 * rounds, 4 * block)):
        wall, cpu, supervisor = time_steps(n, steps, batch)
        peer, peer_cpu = mean(wall["peer"], wall["control"]), mean(cpu["peer"], cpu["control"])
        how, target = f"{n} rounds of {steps} steps", STEP if batch == 32 else None
        rows += [
            ratio_row(f"step, batch {batch}", how, wall["ours"], peer, target)
            | {"cpu": ratio_row("", "", cpu["ours"], peer_cpu), "supervisor_cores": supervisor},
            ratio_row(f"step, batch {batch}, control", how, wall["control"], wall["peer"])
            | {"cpu": ratio_row("", "", cpu["control"], cpu["peer"])},
        ]
        for tool in TOOLS:
            name = f"step, batch {batch}, against {tool}"
            if tool in INSTALLED:
                rows.append(
                    ratio_row(name, how, wall["ours"], wall[tool])
                    | {"cpu": ratio_row("", "", cpu["ours"], cpu[tool]), "version": importlib.metadata.version(tool)}
                )
            else:
                rows.append({"name": name, "how": how, "skipped": f"{tool} is not installed here"})
        found[batch] = wall["ours"], peer, supervisor
    whole = statistics.median(found[32][1])
    costs = [ours * (1 - found[2][2]) - peer for ours, peer in zip(*found[2][:2], strict=True)]
    how = f"{statistics.median(costs) * 1000:+.2f} ms a step, supervisor {found[32][2]:.1%} of a core"
    estimates = [(whole + cost) * (1 + found[32][2]) for cost in costs]
    rows.append(ratio_row("step, batch 32, estimated", how, estimates, [whole] * len(costs), STEP))
    return rows


def measure_loop(steps: int) -> list[Row]:
    """What a loop takes between two steps, ours and the hand-written one, and which part of ours takes how much."""
    rows = []
    for processes in (1, PROCESSES):
        found: dict[str, list[dict[str, Any]]] = {"ours": [], "peer": []}
        for i in range(LOOP_LAUNCHES):
            say(f"the loop: {processes} processes, launch {i + 1}/{LOOP_LAUNCHES}")
            with tempfile.TemporaryDirectory() as folder:
                report = Path(folder) / "report.json"
                settings = [
                    *(
                        "strategy=ddp",
                        "strategy._target_=benchmarks.empty_step.EmptyStep",
                        f"+strategy.report={report}",
                    ),
                    *("trust=[benchmarks]", f"cluster.processes={processes}", f"train.steps={steps}"),
                    *("train.eval_batches=0", "checkpoint.every=0", f"run_dir={folder}/run"),
                ]
                peer = ["-m", "benchmarks.overhead", "--empty-peer", str(report), "--steps", str(steps)]
                sides = {
                    "ours": [sys.executable, "launch.py", *settings],
                    "peer": [*TORCHRUN[:-1], f"--nproc-per-node={processes}", *peer],
                }
                for name, command in alternate(i, **sides):
                    ran = subprocess.run(command, cwd=ROOT, env=environment(), capture_output=True, text=True)
                    if not report.exists():
                        raise RuntimeError(f"the empty steps of {name} failed:\n{(ran.stdout + ran.stderr)[-3000:]}")
                    found[name].append(json.loads(report.read_text()))
                    report.unlink()
        ours, peer_times = (
            {part: [statistics.median(one[part][k] for one in found[name]) for k in (0, 1)] for part in found[name][0]}
            for name in ("ours", "peer")
        )
        (wall, cpu), (peer_wall, peer_cpu) = ours.pop("whole"), peer_times["whole"]
        ours["the rest"] = [whole - sum(p[i] for p in ours.values()) for i, whole in enumerate((wall, cpu))]
        rows.append({
            "name": f"the loop, {processes} process{'es' * (processes > 1)}", "unit": "s",
            "how": f"{LOOP_LAUNCHES} launches of {steps} empty steps, CPU by part", "ours": wall, "ours_cpu": cpu,
            "peer": peer_wall, "peer_cpu": peer_cpu, "added": wall - peer_wall, "added_cpu": cpu - peer_cpu,
            "parts": ours, "target": LOOP, "met": cpu <= LOOP and wall - peer_wall <= LOOP,
        })  # fmt: skip
    return rows


def compare_hooks(steps: int) -> Row:
    """What the loop takes between two steps with a hook that does nothing, and without hooks."""
    found: dict[str, list[list[float]]] = {"hook": [], "none": []}
    for i in range(HOOK_LAUNCHES):
        say(f"hooks: launch {i + 1}/{HOOK_LAUNCHES}")
        for name, hook in alternate(i, hook=["hooks=benchmarks.empty_step.EmptyHook"], none=["hooks=none"]):
            with tempfile.TemporaryDirectory() as folder:
                report = Path(folder) / "report.json"
                settings = [
                    *("strategy=ddp", "strategy._target_=benchmarks.empty_step.EmptyStep"),
                    *(f"+strategy.report={report}", "trust=[benchmarks]", "cluster.processes=1"),
                    *(f"train.steps={steps}", "train.eval_batches=0", "checkpoint.every=0", f"run_dir={folder}/run"),
                ]
                command = [sys.executable, "launch.py", *settings, *hook]
                ran = subprocess.run(command, cwd=ROOT, env=environment(), capture_output=True, text=True)
                if not report.exists():
                    raise RuntimeError(f"the empty steps failed:\n{(ran.stdout + ran.stderr)[-3000:]}")
                found[name].append(json.loads(report.read_text())["whole"])
    how = f"{HOOK_LAUNCHES} launches of {steps} empty steps; CPU time of the loop"
    with_hook, without = ([cpu for _, cpu in found[name]] for name in ("hook", "none"))
    return ratio_row("the loop: an empty hook / hooks=none", how, with_hook, without)


def compare_command(what: str, ours: list[str], rounds: int) -> Row:
    times: Blocks = {"ours": [], "peer": []}
    for i in range(-1, rounds):  # the first warms the disk cache
        say(f"{what}: round {max(0, i + 1)}/{rounds}")
        for name, command in alternate(i, ours=ours, peer=["-c", "import torch"]):
            began = time.perf_counter()
            subprocess.run([sys.executable, *command], cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
            times[name].append(time.perf_counter() - began)
    return ratio_row(f"{what} / import torch", f"{rounds} rounds", times["ours"][1:], times["peer"][1:], DRY_RUN)


def compare_commands(rounds: int) -> list[Row]:
    plan = "from dtrain.cli import main; main(['plan', 'model=llama-7b', 'cluster=aws-ib', 'cluster.nodes=4'])"
    commands = {"dry run": ["launch.py", "dry_run=true"], "plan": ["-c", plan]}
    return [compare_command(what, command, rounds) for what, command in commands.items()]


def compare_first_step(strategy: str, ranks: int, rounds: int) -> Row:
    times: Blocks = {"ours": [], "peer": []}
    cpu: Blocks = {"ours": [], "peer": []}
    for i in range(-1, rounds):  # the first writes the bytecode
        say(f"first step, {strategy}: round {max(0, i + 1)}/{rounds}")
        with tempfile.TemporaryDirectory() as folder:
            run, out = Path(folder, "run"), Path(folder, "out.txt")
            settings = [f"strategy={strategy}", f"cluster.processes={ranks}", "train.stop_after=1", f"run_dir={run}"]
            ours = [sys.executable, "launch.py", *settings], run / "metrics.jsonl"
            torchrun = [*TORCHRUN[:-1], f"--nproc-per-node={ranks}"]
            peer = [*torchrun, "benchmarks/handwritten.py", "--steps", "1"], out
            for name, (command, watched) in alternate(i, ours=ours, peer=peer):
                with open(out, "w") as file:
                    began, used = time.perf_counter(), children_s()
                    process = subprocess.Popen(command, cwd=ROOT, env=environment(ranks), stdout=file, stderr=file)
                    while not has_step(watched):
                        if process.poll() is not None and not has_step(watched):
                            raise RuntimeError(f"{name} ended before its first step:\n{out.read_text()}")
                        time.sleep(0.005)
                    times[name].append(time.perf_counter() - began)
                    process.wait()
                    cpu[name].append(children_s() - used)
    more = [ours - peer for ours, peer in zip(times["ours"][1:], times["peer"][1:], strict=True)]
    seconds, target = statistics.median(times["ours"][1:]), START[strategy, ranks]
    used_s = {name: statistics.median(values[1:]) for name, values in cpu.items()}
    how = f"{rounds} rounds; CPU time {used_s['ours']:.1f} s, peer {used_s['peer']:.1f} s"
    return {
        "name": f"first step, {strategy}, {ranks} ranks", "how": how, "unit": "s",
        "ours": seconds, "peer": statistics.median(times["peer"][1:]),
        "ours_cpu": used_s["ours"], "peer_cpu": used_s["peer"],
        "difference": statistics.median(more), "range": interval(more), "target": target, "met": seconds <= target,
    }  # fmt: skip


def children_s() -> float:
    """CPU seconds of the processes that have ended and been waited for."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def has_step(path: Path) -> bool:
    """Has the whole line of the first step come?"""
    text = path.read_text() if path.exists() else ""
    return any('"loss"' in line or line.startswith("step 1 loss") for line in text.split("\n")[:-1])


def alternate(i: int, **sides: Any) -> Iterator[tuple[str, Any]]:
    """A B, then B A: neither side always comes first."""
    yield from sides.items() if i % 2 else reversed(sides.items())


# ---- figures -----------------------------------------------------------------------------------------------


def mean(first: list[float], second: list[float]) -> list[float]:
    return [(a + b) / 2 for a, b in zip(first, second, strict=True)]


def ratio_row(name: str, how: str, ours: list[float], peer: list[float], target: float | None = None) -> Row:
    ratios = [a / b for a, b in zip(ours, peer, strict=True)]
    ratio = statistics.median(ratios)
    return {
        "name": name, "how": how, "unit": "s", "ours": statistics.median(ours), "peer": statistics.median(peer),
        "ratio": ratio, "range": interval(ratios), "target": target,
        "met": None if target is None else ratio <= target,
    }  # fmt: skip


def interval(values: list[float]) -> tuple[float, float]:
    """A 95% interval of the median, by the order of the values alone (binomial, normal approximation)."""
    ordered, middle, half = sorted(values), (len(values) - 1) / 2, 0.98 * math.sqrt(len(values))
    return ordered[max(0, math.floor(middle - half))], ordered[min(len(values) - 1, math.ceil(middle + half))]


def hardware() -> dict[str, Any]:
    cpu = platform.processor()
    with contextlib.suppress(OSError, StopIteration):
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        cpu = next(line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return {"cpu": cpu, "arch": platform.machine(), "cores": os.cpu_count(), "system": platform.system()}


def commit() -> str:
    """The commit, and whether what was measured is exactly that."""

    def git(*words: str) -> str:
        return subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True).stdout.strip()

    changed = git("status", "--porcelain", "--", "dtrain", "conf", "launch.py", "benchmarks/*.py")
    return (git("rev-parse", "--short=12", "HEAD") or "unknown") + ("+changes" if changed else "")


def print_table(rows: list[Row], load: list[float]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table("comparison", "how", title="dtrain against a hand-written script, medians (95% interval)")
    for heading in ("ours", "peer", "ours to peer", "CPU of rank 0", "target", "met"):
        table.add_column(heading, justify="right", no_wrap=True)
    for row in rows:
        if "skipped" in row:
            table.add_row(row["name"], row["skipped"])
            continue
        if "added" in row:
            parts = sorted(row["parts"].items(), key=lambda part: -part[1][1])
            how = ", ".join(f"{name} {cpu * 1e6:.0f}" for name, (_, cpu) in parts)
            figures = [
                f"{row[key] * 1e6:{form}} µs" for key, form in (("ours", ".0f"), ("peer", ".0f"), ("added", "+.0f"))
            ]
            figures.append(f"{row['ours_cpu'] * 1e6:.0f} µs to {row['peer_cpu'] * 1e6:.0f}")
            met = "yes" if row["met"] else "NO"
            table.add_row(row["name"], f"{row['how']}: {how}", *figures, f"≤ {row['target'] * 1e6:.0f} µs", met)
            continue
        ours, peer = (f"{t:.2f} s" if row["ours"] >= 1 else f"{t * 1e3:.1f} ms" for t in (row["ours"], row["peer"]))
        value, target = ratio_text(row), f"≤ {row['target']}" if row["target"] else ""
        if "difference" in row:
            low, high = row["range"]
            value, target = f"{row['difference']:+.2f} s ({low:+.2f} to {high:+.2f})", f"ours ≤ {row['target']} s"
        cpu = ratio_text(row["cpu"]) if "cpu" in row else ""
        met = {True: "yes", False: "NO", None: ""}[row["met"]]
        table.add_row(row["name"], row["how"], ours, peer, value, cpu, target, met)
    console = Console(width=max(170, Console().width), highlight=False)
    console.print(table)
    console.print(f"load average {load[0]:.1f} before, {load[1]:.1f} after, {os.cpu_count()} cores; "
                  "control = the peer against itself: the noise of the row above")  # fmt: skip


def ratio_text(row: Row) -> str:
    return f"{row['ratio']:.3f} ({row['range'][0]:.3f} to {row['range'][1]:.3f})" if "ratio" in row else ""


def say(text: str) -> None:
    if sys.stderr.isatty():
        print(f"\r{text:<60}", end="", file=sys.stderr, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=60, help="of the step comparison; twice as many at batch 2")
    parser.add_argument("--steps", type=int, default=3, help="timed steps of a block; four times as many at batch 2")
    parser.add_argument("--quick", action="store_true", help="a few rounds, to see that it runs")
    parser.add_argument("--loop", action="store_true", help="only the loop alone: two minutes")
    parser.add_argument("--hooks", action="store_true", help="only an empty hook beside none: three minutes")
    parser.add_argument("--commands", action="store_true", help="only what dry_run and plan take: a minute")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results there")
    parser.add_argument("--first-step", action="store_true", help="only the time to the first step: five minutes")
    options = parser.parse_args()
    if sys.dont_write_bytecode:  # and perhaps nothing was compiled at installation: each import would compile anew
        os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
        os.environ["PYTHONPYCACHEPREFIX"] = tempfile.mkdtemp(prefix="dtrain-bytecode-")
        atexit.register(shutil.rmtree, os.environ["PYTHONPYCACHEPREFIX"], ignore_errors=True)
    rounds, short, long = (4, 3, 2) if options.quick else (options.rounds, 11, 7)

    load, measured = [os.getloadavg()[0]], commit()
    if options.first_step:
        rows = [compare_first_step(*which, long) for which in START]
    elif options.commands or options.hooks:
        rows = compare_commands(short) if options.commands else [compare_hooks(LOOP_STEPS)]
    else:
        rows = measure_loop(LOOP_STEPS)
    if not (options.loop or options.commands or options.hooks or options.first_step):
        rows = [*compare_steps(rounds, options.steps), *rows, compare_hooks(LOOP_STEPS)]
        rows += [*compare_commands(short), *(compare_first_step(*which, long) for which in START)]
    load.append(os.getloadavg()[0])
    say("")
    print_table(rows, load)
    if options.json:
        torch_version = importlib.metadata.version("torch")
        results = {
            "benchmark": "overhead",
            "hardware": hardware() | {"load_average": load},
            "versions": {"python": platform.python_version(), "torch": torch_version, "dtrain": __version__},
            "commit": measured if commit() == measured else f"{measured}, changed while it ran",
            "date": datetime.now(UTC).strftime("%Y-%m-%d"),
            "rows": rows,
        }
        options.json.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    if sys.argv[1:2] == ["--empty-peer"]:  # a rank of the hand-written loop, whose steps compute nothing
        from benchmarks import handwritten
        from benchmarks.empty_step import Empty

        made: list[Empty] = []
        handwritten.main(sys.argv[3:], around_step=lambda step: made.append(Empty(step, Path(sys.argv[2]))) or made[0])
        made[0].write()
    elif sys.argv[1:2] == ["--gated-peer"]:  # a rank of a peer's world: handwritten.py, held by a gate
        from benchmarks import handwritten, with_tools

        world, gate = sys.argv[2], Gate(sys.argv[3], int(sys.argv[4]))
        if world in TOOLS:
            with_tools.main(world, sys.argv[5:], before_step=gate)
        else:
            handwritten.main(sys.argv[5:], before_step=gate)
    else:
        main()
