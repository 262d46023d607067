"""What does dtrain cost over a hand-written DDP script? Step time, launcher start, time to the first step.

    python benchmarks/overhead.py [--rounds 60] [--steps 3] [--quick] [--json benchmarks/results/overhead-cpu.json]

1. Step time: `python launch.py` (supervisor, progress display, votes, metrics: all of it) against handwritten.py,
   on gpt2-tiny with two processes. Three worlds are alive at once, ours, the peer, and the peer once more as a
   control, and exactly one runs at a time: each waits before a step until it is told to do the next block. So two
   compared blocks lie a second apart, and load that comes and goes hits both. A step is timed from its start to the
   start of the next, logging included. A round is one block of each; the figure is the median over rounds of the
   ratio of the blocks' median steps; the range is a 95% interval of that median. The control's range is the noise floor.
2. `python launch.py dry_run=true` against `python -c "import torch"`, wall time of the process.
3. Process start to the first step's line (metrics.jsonl; the script's print), both found by looking every 5 ms.

Nothing here passes or fails: it prints both columns and the target.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.metadata
import json
import math
import os
import platform
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np

from dtrain import __version__
from dtrain.data.stdlib import Stdlib
from dtrain.data.text import TokenDataset

ROOT = Path(__file__).resolve().parent.parent
PROCESSES = 2
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={PROCESSES}"]
WARMUP_ROUNDS = 2
ROUNDS_A_SESSION = 20  # then all worlds start anew: where a process's memory happens to lie is worth a percent

Row = dict[str, Any]


# ---- inside a rank: hold the loop before a step, and time the steps ------------------------------------------


class Gate:
    """Called before each step: waits to be told, does `block` steps, reports their times, waits again."""

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
        self.lines.readline()
        self.marks, self.due = [(time.perf_counter(), time.process_time())], self.block + 1


class GatedDataset(TokenDataset):
    """The loop asks every rank's data set for a batch exactly once a step: the place to hold it, with no change to it."""

    gate: Callable[[], None] | None = None
    address, block = "", 0

    def batch(self, indices: np.ndarray) -> Any:
        if self.gate is not None:
            self.gate()
        elif self.address:  # the first call is the loop asking for the shape of a sample
            self.gate = Gate(self.address, self.block)
        return super().batch(indices)


class GatedStdlib(Stdlib):
    """data=stdlib with a gate before each training batch."""

    def __init__(self, seq_len: int, address: str, block: int, val_fraction: float = 0.05) -> None:
        super().__init__(seq_len, val_fraction)
        self.address, self.block = address, block

    def dataset(self, split: str) -> TokenDataset:
        dataset = super().dataset(split)
        if split == "train":
            dataset.__class__ = GatedDataset
            dataset.address, dataset.block = self.address, self.block  # type: ignore[attr-defined]
        return dataset


# ---- outside: worlds that run in turn ------------------------------------------------------------------------


class World:
    """One training of two ranks on a terminal of its own, that runs a block of steps when told and else waits."""

    def __init__(self, folder: Path, name: str, batch: int, block: int, total_steps: int) -> None:
        self.name, self.is_ours = name, name == "ours"
        address = str(folder / f"{name}.sock")
        if self.is_ours:
            command = [
                sys.executable, "launch.py", "strategy=ddp", "model=gpt2-tiny", f"cluster.processes={PROCESSES}",
                f"train.global_batch_size={batch}", f"train.steps={total_steps}", "train.eval_batches=0",
                "checkpoint.every=0", f"run_dir={folder / 'run'}", "trust=[benchmarks]",
                "data._target_=benchmarks.overhead.GatedStdlib", f"+data.address={address}", f"+data.block={block}",
            ]  # fmt: skip
        else:
            gated = ["-m", "benchmarks.overhead", "--gated-peer", address, str(block)]
            command = [*TORCHRUN, *gated, "--batch", str(batch), "--steps", str(total_steps)]
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(address)
            listener.listen()
            listener.settimeout(0.5)
            self.screen, terminal = os.openpty()
            self.said = b""
            self.process = subprocess.Popen(
                command, cwd=ROOT, env=environment(), stdin=subprocess.DEVNULL, stdout=terminal, stderr=terminal
            )
            os.close(terminal)
            threading.Thread(target=self._read_screen, daemon=True).start()
            self.ranks = []
            while len(self.ranks) < PROCESSES:
                try:
                    self.ranks.append(listener.accept()[0].makefile("rw"))
                except TimeoutError:
                    self._check_alive()
        self._results()  # every rank is before its first step
        self._pause()

    def run_block(self) -> list[tuple[float, float]]:
        """(wall, CPU) seconds of rank 0's steps of one block."""
        self._go()
        steps = self._results()
        self._pause()
        return steps

    def finish(self) -> None:
        self._go()
        if self.process.wait(timeout=300):
            self._fail()
        os.close(self.screen)

    def _go(self) -> None:
        if self.is_ours:
            self.process.send_signal(signal.SIGCONT)
        for rank in self.ranks:
            rank.write("go\n")
            rank.flush()

    def _pause(self) -> None:
        # The supervisor would go on polling in the peer's blocks and slow the peer down; torchrun, which all have, may
        if self.is_ours:
            self.process.send_signal(signal.SIGSTOP)

    def _results(self) -> list[tuple[float, float]]:
        lines = [rank.readline() for rank in self.ranks]
        if not all(lines):
            self._fail()
        return min((json.loads(line) for line in lines), key=lambda message: message["rank"])["steps"]

    def _read_screen(self) -> None:
        with contextlib.suppress(OSError):  # closed at the other end, or by finish
            while data := os.read(self.screen, 65536):
                self.said = (self.said + data)[-4000:]

    def _check_alive(self) -> None:
        if self.process.poll() is not None:
            self._fail()

    def _fail(self) -> None:
        raise RuntimeError(f"the world {self.name!r} ended early:\n{self.said.decode(errors='replace')}")

    def kill(self) -> None:
        if self.process.poll() is None:
            self.process.kill()  # the ranks of both sides lose their gate, and torchrun's die with it
        for rank in self.ranks:
            rank.close()


def environment() -> dict[str, str]:
    """The same for both sides: what cluster=local would set."""
    threads = max(1, len(os.sched_getaffinity(0)) // PROCESSES) if hasattr(os, "sched_getaffinity") else 1
    ours = {"OMP_NUM_THREADS": str(threads), "PYTHONPATH": str(ROOT), "TERM": "xterm-256color", "COLUMNS": "120"}
    return os.environ | ours


# ---- the three comparisons -----------------------------------------------------------------------------------


def step_time(rounds: int, block: int, batch: int, target: float | None) -> list[Row]:
    names = ["ours", "peer", "control"]
    wall: dict[str, list[float]] = {name: [] for name in names}  # the median step of each block
    cpu: dict[str, list[float]] = {name: [] for name in names}
    num_sessions = max(1, round(rounds / ROUNDS_A_SESSION))
    for session in range(num_sessions):
        session_rounds = len(range(session, rounds, num_sessions))
        total_steps = (WARMUP_ROUNDS + session_rounds) * (block + 1) + 1  # the last one ends the world
        with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
            worlds = []
            for name in names:
                worlds.append(World(Path(folder), name, batch, block + 1, total_steps))
                stack.callback(worlds[-1].kill)
            for i in range(-WARMUP_ROUNDS, session_rounds):
                say(f"step time, batch {batch}: session {session + 1}/{num_sessions}, round {max(0, i + 1)}/{session_rounds}")
                # Every order comes equally often: what runs before leaves its mark on the caches.
                order = [worlds[(i // 2 + k) % 3] for k in range(3)]
                for world in order if i % 2 else reversed(order):
                    steps = world.run_block()[1:]  # the first finds cold caches
                    if i >= 0:
                        wall[world.name].append(statistics.median(w for w, _ in steps))
                        cpu[world.name].append(statistics.median(c for _, c in steps))
            for world in worlds:
                world.finish()
    how = f"batch {batch}, {rounds} rounds of {block} steps, {num_sessions} launches"
    return [
        ratio_row("step time", f"wall, {how}", "ours / handwritten", wall["ours"], wall["peer"], target),
        ratio_row("step time, control", f"wall, {how}", "handwritten / itself", wall["control"], wall["peer"]),
        ratio_row("step CPU", f"CPU of rank 0, {how}", "ours / handwritten", cpu["ours"], cpu["peer"]),
        ratio_row("step CPU, control", f"CPU of rank 0, {how}", "handwritten / itself", cpu["control"], cpu["peer"]),
    ]


def dry_run(rounds: int) -> Row:
    ours, peer = [], []
    for i in range(-1, rounds):  # the first warms the disk cache
        say(f"dry run: round {max(0, i + 1)}/{rounds}")
        times = {}
        for name, command in alternate(i, ours=["launch.py", "dry_run=true"], peer=["-c", "import torch"]):
            began = time.perf_counter()
            subprocess.run([sys.executable, *command], cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
            times[name] = time.perf_counter() - began
        if i >= 0:
            ours.append(times["ours"])
            peer.append(times["peer"])
    return ratio_row("dry run", f"wall, {rounds} rounds", "launch.py dry_run=true / import torch", ours, peer, 0.5)


def first_step(rounds: int) -> Row:
    ours, peer = [], []
    for i in range(-1, rounds):
        say(f"first step: round {max(0, i + 1)}/{rounds}")
        with tempfile.TemporaryDirectory() as folder:
            run, out = Path(folder, "run"), Path(folder, "peer.txt")
            start = [sys.executable, "launch.py", f"cluster.processes={PROCESSES}", "train.stop_after=1", f"run_dir={run}"]
            script = [*TORCHRUN, str(ROOT / "benchmarks" / "handwritten.py"), "--steps", "1"]
            commands = {"ours": (start, run / "metrics.jsonl"), "peer": (script, out)}
            times = {}
            for name, (command, watched) in alternate(i, **commands):
                with open(out, "w") if name == "peer" else open(os.devnull, "w") as stdout:
                    began = time.time()
                    process = subprocess.Popen(command, cwd=ROOT, env=environment(), stdout=stdout, stderr=subprocess.DEVNULL)
                    while not has_step(watched):
                        time.sleep(0.005)
                        if process.poll() is not None and not has_step(watched):
                            raise RuntimeError(f"{command} ended with {process.returncode} before a step")
                    times[name] = time.time() - began
                    process.wait()
            if i >= 0:
                ours.append(times["ours"])
                peer.append(times["peer"])
    differences = [a - b for a, b in zip(ours, peer, strict=True)]
    low, high = interval(differences)
    median = statistics.median(differences)
    return {
        "name": "first step", "what": "launch.py - torchrun handwritten.py", "how": f"wall, {rounds} rounds",
        "ours": statistics.median(ours), "peer": statistics.median(peer), "unit": "s",
        "difference": median, "low": low, "high": high, "target": 1.5, "met": median <= 1.5,
    }  # fmt: skip


def has_step(path: Path) -> bool:
    """Has the first step's line come? It starts the file of our metrics; the script's may come after a warning."""
    try:
        text = path.read_text()
    except OSError:
        return False
    return "\n" in text and ('"loss"' in text or "step 1 loss" in text)


def alternate(i: int, **sides: Any) -> Iterator[tuple[str, Any]]:
    """A B, then B A: neither side always comes first."""
    yield from sides.items() if i % 2 else reversed(sides.items())


# ---- figures -------------------------------------------------------------------------------------------------


def ratio_row(name: str, how: str, what: str, ours: list[float], peer: list[float], target: float | None = None) -> Row:
    ratios = [a / b for a, b in zip(ours, peer, strict=True)]
    median = statistics.median(ratios)
    low, high = interval(ratios)
    return {
        "name": name, "what": what, "how": how,
        "ours": statistics.median(ours), "peer": statistics.median(peer), "unit": "s",
        "ratio": median, "low": low, "high": high, "target": target, "met": None if target is None else median <= target,
    }  # fmt: skip


def interval(values: list[float]) -> tuple[float, float]:
    """A 95% interval of the median, from the order of the values alone (binomial, normal approximation)."""
    ordered, half_width = sorted(values), 0.98 * math.sqrt(len(values))
    middle = (len(values) - 1) / 2
    return ordered[max(0, math.floor(middle - half_width))], ordered[min(len(values) - 1, math.ceil(middle + half_width))]


def describe_machine() -> dict[str, Any]:
    cpu = platform.processor() or platform.machine()
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


def print_table(rows: list[Row], load: tuple[float, float]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table("comparison", "how", *(f"[right]{h}" for h in ()), title="dtrain against a hand-written script")
    for heading in ("ours", "peer", "ours to peer (95%)", "target", "met"):
        table.add_column(heading, justify="right")
    for row in rows:
        scale, unit = (1000, "ms") if row["ours"] < 1 else (1, "s")
        ours, peer = (f"{row[side] * scale:.2f} {unit}" for side in ("ours", "peer"))
        if "ratio" in row:
            value = f"× {row['ratio']:.3f} ({row['low']:.3f} to {row['high']:.3f})"
            target = f"≤ × {row['target']}" if row["target"] else "-"
        else:
            value, target = f"{row['difference']:+.2f} s ({row['low']:+.2f} to {row['high']:+.2f})", f"≤ +{row['target']} s"
        met = {True: "yes", False: "NO", None: "-"}[row["met"]]
        table.add_row(f"{row['name']}: {row['what']}", row["how"], ours, peer, value, target, met)
    console = Console(width=None if sys.stdout.isatty() else 170)
    console.print(table)
    console.print(f"Load average before and after: {load[0]:.1f} and {load[1]:.1f} ({os.cpu_count()} cores). "
                  "The control's range is the noise floor of the row above it.", highlight=False)  # fmt: skip


def say(text: str) -> None:
    end = "" if sys.stderr.isatty() else "\n"
    print(f"\r{text:<70}" if not end else text, end=end, file=sys.stderr, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=60, help="rounds of the step-time comparison")
    parser.add_argument("--steps", type=int, default=3, help="timed steps of a block; one more, untimed, goes before them")
    parser.add_argument("--quick", action="store_true", help="a few rounds: does it run? (2 minutes)")
    parser.add_argument("--json", type=Path, help="write the results there")
    options = parser.parse_args()
    rounds, short, long = (6, 3, 2) if options.quick else (options.rounds, 11, 7)

    before = os.getloadavg()[0]
    rows = [dry_run(short), first_step(long)]
    rows = step_time(rounds, options.steps, batch=32, target=1.02) + rows
    # A step of two samples is a tenth as long, so the same cost, if it is one a step, shows ten times larger.
    rows[4:4] = step_time(rounds, options.steps * 4, batch=2, target=None)
    load = (before, os.getloadavg()[0])
    say("")
    print_table(rows, load)
    if options.json:
        results = {
            "benchmark": "overhead",
            "hardware": describe_machine() | {"load_average": load},
            "versions": {"python": platform.python_version(), "torch": importlib.metadata.version("torch"), "dtrain": __version__},
            "commit": commit(),
            "date": datetime.now(UTC).strftime("%Y-%m-%d"),
            "rows": rows,
        }  # fmt: skip
        options.json.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    if sys.argv[1:2] == ["--gated-peer"]:  # a rank of the peer's world: handwritten.py, held by a gate
        from benchmarks import handwritten

        handwritten.main(sys.argv[4:], before_step=Gate(sys.argv[2], int(sys.argv[3])))
    else:
        main()
