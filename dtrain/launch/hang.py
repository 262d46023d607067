"""Finds a run that stands still, and the rank that the others wait for.

Rank 0 writes its position once a second (train/position.py). If it does not move for too long, the positions of all
ranks are read. Each says which collectives it has begun; wait_graph.py compares them.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from dtrain.launch.attempt_files import signature
from dtrain.launch.wait_graph import Position, culprits, is_waiting, main_stack, open_collectives, path_of
from dtrain.runs.causes import is_users_file
from dtrain.runs.folder import write_json
from dtrain.runs.protocol import HANG_FILE, POSITION_FILE, STACK_SIGNAL, pid_namespace
from dtrain.util.format import duration
from dtrain.util.regular_file import read_bytes

# With cluster.hang_timeout=null, a standstill in a step is reported after FACTOR times the slowest recent step, but not
# before REPORT_S, and stopped after FACTOR times as long, but not before STOP_S (NCCL's own timeout).
FACTOR, REPORT_S, STOP_S = 10, 30.0, 600.0
# Other phases vary more: the first steps compile, the last save is not in the background, a start prepares data.
OTHER_S = {
    "start": 1800.0, "first steps": 1800.0, "rollback": 1800.0, "evaluation": 600.0, "first comparison": 600.0,
    "save": 600.0, "end": 600.0,
}  # fmt: skip
FIRST_STEPS = 3
LONGEST_LOOK_S = 2.0  # a longer time between two looks: this process was suspended, and probably the ranks, too
SILENT_S = 5.0  # rank 0 writes once a second; after this long without it, the other ranks' files are read, too
ANSWER_S = 2.0  # time for a rank to print its stacks
FRESH_S = 60.0  # a rank that stands still writes at least every 30 s


@dataclass
class Standstill:
    """A run without progress."""

    seconds: float
    limit_s: float
    stop: bool  # long enough to stop the run
    ranks: list[int]  # those that hold up the others; [] if it is not known
    differ: bool  # these ranks called another collective than the others
    text: str
    positions: dict[int, Position]

    def has_answered(self, rank: int) -> bool:
        """Is it known what the rank does?"""
        return not {"threads", "printed", "process"}.isdisjoint(self.positions[rank])

    def __str__(self) -> str:
        return f"no progress for {duration(self.seconds)}: {self.text}"


class HangWatch:
    """Created before the ranks start; `look` is called about once a second.

    send: asks the ranks of these positions to print their stacks.
    """

    def __init__(
        self, run_dir: Path, num_ranks: int, timeout: float | None, send: Callable[[dict[int, Position]], None]
    ) -> None:
        self.run_dir, self.num_ranks, self.timeout, self.send = run_dir, num_ranks, timeout, send
        self.first, self.report = self._path(0), run_dir / HANG_FILE
        self.position: Position = {}
        self.moves = -1  # of rank 0
        self.progress: tuple[Any, ...] = (-1, signature(run_dir / "metrics.jsonl"))  # changes while the run moves
        self.written = 0.0  # when rank 0 wrote
        self.still = self.silent = 0.0  # seconds since rank 0 moved, and since it wrote
        self.found: Standstill | None = None  # the one that lasts
        self.looked = time.monotonic()

    def look(self) -> Standstill | None:
        """Return a standstill twice: when it is long enough to be reported, and when to be stopped."""
        now = time.monotonic()
        seconds, self.looked = min(now - self.looked, LONGEST_LOOK_S), now
        self.still, self.silent = self.still + seconds, self.silent + seconds
        if self._moved():
            return None
        limit_s = self.limit_s()
        stop_s = limit_s if self.timeout else max(STOP_S, FACTOR * limit_s)
        stop = self.still >= stop_s
        if self.still < limit_s or (self.found and self.found.stop >= stop):
            return None
        positions = self._ask()
        if self._moved() or any(position.get("phase") == "failing" for position in positions.values()):
            return None  # a failing rank writes its error report when its running save has ended
        self.found = Standstill(self.still, limit_s, stop, *roll_call(positions), positions)
        with contextlib.suppress(OSError):  # on a full disk, only the screen shows it
            write_json(self.report, asdict(self.found))
        return self.found

    def _moved(self) -> bool:
        """Read rank 0's position, and the other ranks' if rank 0 does not write; return whether the run moves."""
        position = read(self.first, tries=1)  # not only its mtime, which a network file system caches
        if position and position["written"] != self.written:
            self.position, self.written, self.silent = position, position["written"], 0.0
        elif self.silent >= SILENT_S:  # another rank knows better how far the run has come
            self.silent = 0.0
            known = [self.position, *(read(self._path(rank), tries=1) for rank in range(1, self.num_ranks))]
            self.position = max(known, key=lambda position: position.get("moves", -1))
        # the metrics, too: on a full disk, or after a fault in its thread, rank 0's position is not written
        moves = position["moves"] if position else self.moves
        progress = (moves, signature(self.run_dir / "metrics.jsonl"))
        if progress == self.progress:
            return False
        if self.found:
            self.report.unlink(missing_ok=True)
        self.moves, self.progress, self.still, self.found = moves, progress, 0.0, None
        return True

    def limit_s(self) -> float:
        """Return how long the run may stay where it is."""
        phase, slowest = self.position.get("phase", "start"), self.position.get("slowest", {})
        counts = self.position.get("counts", {})
        if phase in ("data", "step"):
            if counts.get("step", 0) >= FIRST_STEPS:
                usual = slowest.get("data", 0) + slowest.get("step", 0)
                return self.timeout or max(REPORT_S, FACTOR * usual)
            phase = "first steps"
        if phase == "compare":  # of replicas, before a save: collectives only, so it takes as long each time
            if counts.get("compare"):
                return self.timeout or max(REPORT_S, FACTOR * slowest["compare"])
            phase = "first comparison"
        return max(OTHER_S.get(phase, REPORT_S), FACTOR * slowest.get(phase, 0), self.timeout or 0)

    def _path(self, rank: int) -> Path:
        return self.run_dir / POSITION_FILE.format(rank)

    def _ask(self) -> dict[int, Position]:
        """Read where all ranks are. Ranks that did not write during this standstill are asked for their stacks."""
        positions = {rank: read(self._path(rank)) for rank in range(self.num_ranks)}
        newest = max((position["written"] for position in positions.values() if position), default=0.0)
        for position in positions.values():
            if position and newest - position["written"] > min(self.still - 1, FRESH_S):  # of an earlier standstill
                position.pop("threads", None)
                position.pop("groups", None)
        self._ask_for_stacks(
            {rank: position for rank, position in positions.items() if position and "threads" not in position}
        )
        for position in positions.values():
            if is_here(position):
                position["process"] = process_state(position["pid"])
                position["stopped_children"] = stopped_children(position["pid"])
        return positions

    def _ask_for_stacks(self, silent: dict[int, Position]) -> None:
        logs = {rank: self.run_dir / "logs" / f"rank-{rank}.log" for rank in silent}
        sizes = {rank: (signature(log) or (0, 0, 0))[2] for rank, log in logs.items()}
        if silent:
            self.send(silent)
        deadline = time.monotonic() + ANSWER_S
        while silent and time.monotonic() < deadline:
            for rank in list(silent):
                if stack := printed_stack(logs[rank], sizes[rank]):
                    silent.pop(rank)["printed"] = stack
            time.sleep(0.1)


def read(path: Path, tries: int = 3) -> Position:
    """A rank's position; {} if there is none. It is written in place, so a read may find half of it."""
    for _ in range(tries):
        try:
            content = json.loads(read_bytes(path))
            if isinstance(content, dict) and {"rank", "pid", "host", "moves", "phase", "step"} <= content.keys():
                return content | {"written": path.stat().st_mtime}
        except ValueError:
            time.sleep(0.02)
        except OSError:
            break
    return {}


# ---- in words --------------------------------------------------------------------------------------------------


def roll_call(positions: dict[int, Position]) -> tuple[list[int], bool, str]:
    """The ranks that hold up the others, whether by another collective, and a sentence about all ranks."""
    held_up_by, differ = culprits(positions)
    others = Counter(waiting(position) for rank, position in positions.items() if rank not in held_up_by)
    parts = [f"{count} of {len(positions)} ranks {what}" for what, count in others.most_common(3)]
    hosts = {position["host"] for position in positions.values() if position}
    for rank in held_up_by[:3]:
        host = f" on {positions[rank]['host']}" if len(hosts) > 1 and positions[rank] else ""
        parts.append(f"rank {rank}{host} {holding_up(positions[rank])}")
    if len(held_up_by) > 3:
        parts.append(f"and {len(held_up_by) - 3} more ranks")
    return held_up_by, differ, "; ".join(parts)


def waiting(position: Position) -> str:
    """What a rank does that does not hold up the others."""
    if not position:
        return "have not started"
    if found := open_collectives(position):
        last = max(found, key=lambda one: one["seq"])
        return f"wait in {last['op']} {last['seq']} ({phase(position)})"
    return f"wait for a peer ({phase(position)})" if is_waiting(position) else f"are in {phase(position)}"


def holding_up(position: Position) -> str:
    """What a rank does while the others wait for it."""
    if not position:
        return "has not started"
    if position.get("process") == "ended":
        return "has ended"
    if position.get("process") == "stopped":
        return "was stopped by a signal or a debugger"
    if stopped := position.get("stopped_children"):
        what = "its loader process" if position["phase"] == "data" else "its process"
        return f"waits for {what} {stopped[0]}, which was stopped by a signal or a debugger ({phase(position)})"
    if "threads" in position:
        return f"is in {place(position)} ({phase(position)})"
    if "printed" in position:
        return f"is in {place(position)}, which does not release Python's global lock"
    return "does not answer: it was stopped, or its node is gone"


def phase(position: Position) -> str:
    names = {"data": "reading data", "start": "starting", "end": "ending", "compare": "comparing replicas"}
    name = names.get(position["phase"], position["phase"])
    return f"step {position['step']}" if name == "step" else f"{name}, step {position['step']}"


def place(position: Position) -> str:
    """The innermost line of the main thread in the user's code; else in dtrain's; else the innermost."""
    stack = main_stack(position)
    inside: list[Callable[[str], bool]] = [is_users_file, lambda path: "/dtrain/" in path, lambda path: True]
    for belongs in inside:
        for line in stack:
            if belongs(path_of(line)):
                return f"{Path(path_of(line)).name}{line.removeprefix(path_of(line))}"
    return "an unknown place"


# ---- processes of this machine -----------------------------------------------------------------------------------


def process_state(pid: int) -> str:
    """running | stopped | ended"""
    try:
        letter = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return "ended"
    return {"T": "stopped", "t": "stopped", "Z": "ended", "X": "ended"}.get(letter, "running")


def stopped_children(pid: int) -> list[int]:
    """The children of a process that a signal or a debugger has stopped."""
    children: list[int] = []
    for path in Path(f"/proc/{pid}/task").glob("*/children"):
        with contextlib.suppress(OSError):
            children += map(int, path.read_text().split())
    return [child for child in children if process_state(child) == "stopped"]


def has_ended(run_dir: Path, rank: int) -> bool:
    """Did a rank of this machine start and end? False for ranks of other machines."""
    position = read(run_dir / POSITION_FILE.format(rank))
    return is_here(position) and process_state(position["pid"]) == "ended"


def is_here(position: Position) -> bool:
    """Does its process number mean a process that we can look at?"""
    return bool(position) and position.get("pid_namespace") == pid_namespace()


def send_here(positions: dict[int, Position]) -> None:
    for position in positions.values():
        if is_here(position):
            with contextlib.suppress(OSError):
                os.kill(position["pid"], STACK_SIGNAL)


PRINTED = re.compile(r'^  File "([^"\n]+)", line (\d+) in (.+)$', re.M)


def printed_stack(log: Path, begin: int) -> list[str]:
    """The main thread's stack that faulthandler printed into the log after `begin`."""
    try:
        with open(log, "rb") as file:
            file.seek(begin)
            text = file.read().decode(errors="replace")
    except OSError:
        return []
    for thread in re.split(r"^(?:Current thread|Thread) 0x", text, flags=re.M)[1:]:
        frames = [f"{path}:{line}, in {name}" for path, line, name in PRINTED.findall(thread)]
        if any("dtrain/train/rank.py" in frame for frame in frames):
            return frames
    return []
