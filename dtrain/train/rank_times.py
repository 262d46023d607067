"""Where this rank's step time goes: its own work, or waiting for other ranks in collectives.

All ranks have the same step time, because collectives synchronize them: a slow rank is the one that waits least. On a
CPU, the main thread waits for a collective in a futex. So its own work is the rest: its CPU time, the time in which it
was ready but had no CPU, and the time in which it was stopped or blocked in something else. The kernel counts the first
two; a thread samples the others. On a GPU, own work is the host's: the step without the wait for its results.
"""

from __future__ import annotations

import contextlib
import os
import platform
import random
import signal
import sys
import threading
import time
from pathlib import Path

from dtrain.train.process import log

SAMPLE_S = 0.1  # mean time between two samples
FAST_S = 0.005  # while the process is stopped and continued again and again
STOPS_LAST_S = 3.0  # after a SIGCONT, further ones are expected for this long
BUSY = 0.1  # share of a step: with less run-queue delay, its causes are not looked for
FUTEX = {"x86_64": b"202", "aarch64": b"98"}.get(platform.machine(), b"")

# Seconds per step. `own` has data, delay, blocked and stopped in it, and computing; the rest of `wall` is waiting.
# data: until the batch was there; delay: ready to run, but without a CPU; throttled: of that, because the CPU quota of
# its cgroup was used up; blocked: in something that is no collective; saving: not a time, 1 while a save is written.
FIELDS = ("wall", "own", "data", "delay", "throttled", "blocked", "stopped", "saving")


class RankTimes:
    """`start_step` and `end_step` surround a step without its data; `take` returns the means since the last call."""

    def __init__(self, on_gpu: bool = False) -> None:
        self.on_gpu, self.steps, self.saving = on_gpu, 0, False
        self._step = self._data = self._cpu = self._delay = self._waited = self._stopped = 0.0
        self._start = (0.0, 0.0, 0.0)
        self._main = threading.main_thread()
        # its number is the process's: after a fork, Python's native_id is still the parent's
        folder = f"/proc/self/task/{os.getpid()}"
        self._schedstat, self._syscall = _open(f"{folder}/schedstat"), _open(f"{folder}/syscall")
        self._helpers: dict[int, int] = {}  # run-queue delay of the other threads at the last `take`, if it read them
        self._quota: tuple[Path | None, float] = (None, 0.0)
        self._sampler = 0  # the thread's id
        self._in_step = False
        self._in_futex = self._elsewhere = 0.0  # samples in which the main thread was blocked
        self._where = self._reported = ""
        self._continued = -STOPS_LAST_S
        self._ended = threading.Event()
        if not on_gpu and self._schedstat is not None and self._syscall is not None:
            signal.signal(signal.SIGCONT, self._on_continue)
            threading.Thread(target=self._sample, name="dtrain-times", daemon=True).start()

    def start_step(self) -> None:
        self._start = self._now()
        self._in_step = True

    def end_step(self, data_s: float, waited_s: float = 0.0) -> None:
        """`waited_s`: for the results of a step on a GPU."""
        self._in_step = False
        now, start = self._now(), self._start
        self._step += now[0] - start[0]
        self._cpu += now[1] - start[1]
        self._delay += now[2] - start[2]
        self._data += data_s
        self._waited += waited_s
        self.steps += 1

    def take(self) -> list[float]:
        """The means of FIELDS over the steps since the last call."""
        delay, throttled, blocked, stopped = self._delay, 0.0, 0.0, 0.0
        is_busy = delay > BUSY * self._step
        by_quota, by_helpers = self._since_last(is_busy)
        if is_busy:
            throttled = min(delay, by_quota)
        if self.on_gpu:
            own, wall = self._data + self._step, self._data + self._step + self._waited
        else:
            rest = max(0.0, self._step - self._cpu - delay)
            stopped = min(self._stopped, rest)
            samples = self._in_futex + self._elsewhere
            blocked = (rest - stopped) * (self._elsewhere / samples if samples else 0.0)
            # the main thread also waits for its own threads, which run collectives and matmuls: without a CPU, too
            delay += min(by_helpers, rest - stopped - blocked)
            wall = self._data + self._step
            own = wall - max(0.0, self._step - self._cpu - delay - stopped - blocked)
        if blocked > 0.25 * wall and self._where != self._reported:
            self._reported = self._where
            log.warning("%.0f%% of a step is spent in %s, outside collectives", 100 * blocked / wall, self._where)
        sums = (wall, own, self._data, delay, throttled, blocked, stopped)
        means = [value / max(1, self.steps) for value in sums] + [float(self.saving)]
        self._step = self._data = self._cpu = self._delay = self._waited = self._stopped = 0.0
        self.steps, self.saving = 0, False
        self._in_futex, self._elsewhere = self._in_futex / 2, self._elsewhere / 2  # a short window has few samples
        return means

    def end(self) -> None:
        self._ended.set()

    def _now(self) -> tuple[float, float, float]:
        delay = _delay(self._schedstat) * 1e-9 if self._schedstat is not None else 0.0
        return time.perf_counter(), time.thread_time(), delay

    def _since_last(self, is_busy: bool) -> tuple[float, float]:
        """Seconds since the last call in which the cgroup's quota was used up, and longest delay of another thread."""
        if not is_busy:
            self._quota, self._helpers = (None, 0.0), {}
            return 0.0, 0.0
        path = cpu_stat(Path("/proc/self/cgroup"), Path("/sys/fs/cgroup"))
        old_path, before = self._quota
        self._quota = (path, throttled_s(path))
        helpers, self._helpers = self._helpers, run_delays({os.getpid(), self._sampler})
        longest = max((self._helpers[thread] - helpers[thread] for thread in helpers.keys() & self._helpers), default=0)
        return max(0.0, self._quota[1] - before) if path == old_path else 0.0, longest * 1e-9

    def _on_continue(self, number: int, frame: object) -> None:
        self._continued = time.perf_counter()

    def _sample(self) -> None:
        """What is the main thread blocked in? And, if the process is stopped now and then, for how long?"""
        self._sampler = threading.get_native_id()
        own_schedstat = _open(f"/proc/self/task/{self._sampler}/schedstat")
        assert own_schedstat is not None and self._syscall is not None
        while True:
            before, delay = time.perf_counter(), _delay(own_schedstat)
            stops = before - self._continued < STOPS_LAST_S
            period = FAST_S if stops else random.uniform(0.5, 1.5) * SAMPLE_S
            if self._ended.wait(period):
                return
            if stops and self._in_step:
                late = time.perf_counter() - before - period - (_delay(own_schedstat) - delay) * 1e-9
                self._stopped += late if late > FAST_S else 0.0
            call = os.pread(self._syscall, 999, 0).split()[0]
            if call == b"running" or not self._in_step:
                continue
            if call == FUTEX:
                self._in_futex += 1
            else:
                self._elsewhere += 1
                frame = sys._current_frames().get(self._main.ident or 0)
                if frame is not None:
                    code = frame.f_code
                    self._where = f"{Path(code.co_filename).name}:{frame.f_lineno}, in {code.co_name}"


def cpu_stat(cgroups: Path, mounted: Path) -> Path | None:
    """The file in which the kernel counts for how long a quota held back this process's cgroup (version 1 or 2)."""
    found = {}
    with contextlib.suppress(OSError, ValueError):
        for line in cgroups.read_text().splitlines():
            _, controllers, group = line.split(":", 2)
            for name in controllers.split(","):
                found[name] = Path(controllers or ".") / group.strip("/") / "cpu.stat"
    path = found.get("cpu") or found.get("")
    return mounted / path if path else None


def throttled_s(stat: Path | None) -> float:
    """Seconds that the file counts so far."""
    with contextlib.suppress(OSError, ValueError):
        for line in stat.read_text().splitlines() if stat else ():
            name, value = line.split()
            if name in ("throttled_time", "throttled_usec"):
                return int(value) * (1e-9 if name == "throttled_time" else 1e-6)
    return 0.0


def run_delays(without: set[int]) -> dict[int, int]:
    """Nanoseconds in which each other thread of this process was ready but had no CPU, so far."""
    found = {}
    for name in os.listdir("/proc/self/task"):
        if int(name) not in without:
            with contextlib.suppress(OSError, IndexError), open(f"/proc/self/task/{name}/schedstat", "rb") as file:
                found[int(name)] = int(file.read().split()[1])  # unless the thread has just ended
    return found


def _delay(schedstat: int) -> int:
    return int(os.pread(schedstat, 99, 0).split()[1])


def _open(path: str) -> int | None:
    """A descriptor that stays open: reading a file of /proc again takes 2 µs, opening it 10."""
    with contextlib.suppress(OSError):
        return os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    return None
