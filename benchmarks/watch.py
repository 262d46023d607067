"""What does `dtrain watch` cost while it follows a live run? Starts a run and watches it in a pseudo-terminal.

    python benchmarks/watch.py [--seconds 60] [--json benchmarks/results/watch-cpu.json]

CPU time is what /proc reports for the process of `dtrain watch` and the commands that it starts, after its start, as a
share of one core; `bytes_per_s` is what it writes to the terminal. `start_s` is the CPU time until the first page. The
list has 50 runs, of which each writes a line of metrics every second.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import json
import os
import pty
import select
import signal
import struct
import subprocess
import sys
import tempfile
import termios
import time
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks.throughput import environment  # noqa: E402

TICKS = os.sysconf("SC_CLK_TCK")
LISTED = 50
LONG = 100_000  # steps of a run that was watched from its end
COMMAND = [sys.executable, "-m", "dtrain", "watch"]


def cpu_s(pid: int) -> float:
    """CPU time of a process and of its children that have ended."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return sum(map(int, fields[11:15])) / TICKS


def watch(folder: Path, columns: int, lines: int, seconds: float, each_second: Callable[[], None]) -> dict[str, object]:
    pid, terminal = pty.fork()
    if pid == 0:
        os.environ.update(TERM="xterm-256color", PYTHONPATH=str(ROOT))
        os.execv(COMMAND[0], [*COMMAND, str(folder)])
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", lines, columns, 0, 0))
    written, text = 0, b""

    def drain(until: float) -> None:
        nonlocal written, text
        beat = time.monotonic()
        while (left := until - time.monotonic()) > 0:
            if time.monotonic() >= beat:
                each_second()
                beat += 1
            if select.select([terminal], [], [], min(left, 0.2))[0]:
                data = os.read(terminal, 1 << 16)
                written += len(data)
                text = (text + data)[-1_000_000:]

    try:
        start = time.monotonic()
        while b"quit" not in text:
            assert time.monotonic() - start < 60, text[-2000:]
            drain(time.monotonic() + 0.1)
        start_s = cpu_s(pid)
        drain(time.monotonic() + 3)
        began, before, written = time.monotonic(), cpu_s(pid), 0
        drain(began + seconds)
        took, used = time.monotonic() - began, cpu_s(pid) - before
    finally:
        os.kill(pid, signal.SIGTERM)
        with contextlib.suppress(OSError):  # its end of the terminal is closed
            while os.read(terminal, 1 << 16):
                pass
        os.waitpid(pid, 0)
        os.close(terminal)
    result = {"core_percent": round(100 * used / took, 2), "bytes_per_s": round(written / took)}
    return {**result, "start_s": round(start_s, 2), "seconds": round(took, 1)}


def line(step: int) -> str:
    values = {"step": step, "loss": 3 + 8 / (1 + step / 50), "lr": 3e-4, "grad_norm": 0.4, "tokens": 4096 * step}
    values |= {"tokens_per_s": 5e5, "step_s": 1.0, "data_s": 0.01, "mfu": 0.4, "mem_gib": 60.0}
    return json.dumps(values) + "\n"


def made(folder: Path, steps: int) -> Path:
    """A run folder that says it is running, as this process."""
    folder.mkdir(parents=True)
    launch = {"time": time.strftime("%Y-%m-%dT%H:%M:%S+0000", time.gmtime())}
    values = {"host": os.uname().nodename, "pid": os.getpid(), "launches": [launch]}
    (folder / "launch.json").write_text(json.dumps(values))
    (folder / "summary.json").write_text(json.dumps({"status": "running", "total_steps": 10**6, "model": "gpt2"}))
    (folder / "metrics.jsonl").write_text("".join(map(line, range(1, steps + 1))))
    return folder


def append(folders: list[Path], step: list[int], count: int = 1) -> None:
    for folder in folders:
        with open(folder / "metrics.jsonl", "a") as file:
            file.writelines(line(step[0] + i) for i in range(1, count + 1))
    step[0] += count


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    rows: dict[str, object] = {}

    def measure(name: str, folder: Path, columns: int, lines: int, beat: Callable[[], None] = lambda: None) -> None:
        rows[name] = watch(folder, columns, lines, options.seconds, beat)
        print(f"{name}: {rows[name]}", flush=True)

    with tempfile.TemporaryDirectory() as folder:
        run_dir = Path(folder) / "run"
        overrides = ["recipe=cpu-tiny", "train.steps=1000000", "train.eval_every=20", "checkpoint.every=50"]
        command = [sys.executable, "launch.py", *overrides, f"run_dir={run_dir}"]
        run = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        try:
            while not (run_dir / "metrics.jsonl").is_file() or (run_dir / "metrics.jsonl").stat().st_size < 1000:
                assert run.poll() is None
                time.sleep(1)
            for columns, lines in ((80, 24), (200, 50)):
                before = (run_dir / "metrics.jsonl").read_bytes().count(b"\n")
                name = f"a live run of cpu-tiny, {columns}x{lines}"
                measure(name, run_dir, columns, lines)
                after = (run_dir / "metrics.jsonl").read_bytes().count(b"\n")
                rows[name]["metrics_lines"] = after - before  # type: ignore[index]
        finally:
            run.terminate()
            run.wait()
        long = made(Path(folder) / "long", LONG)
        step = [LONG]
        measure(f"a run at step {LONG}, 10 steps/s, 200x50", long, 200, 50, lambda: append([long], step, 10))
        runs = [made(Path(folder) / "list" / f"{i}-lr={i}", 1000) for i in range(LISTED)]
        steps = [1000]
        name = f"a list of {LISTED} live runs, 1 step/s each, 200x50"
        measure(name, runs[0].parent, 200, 50, lambda: append(runs, steps))
    if options.json:
        options.json.write_text(json.dumps({**environment(), "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
