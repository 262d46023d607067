"""Where this rank is: phase, step, open collectives and stacks, in a small file for the supervisor (launch/hang.py).

The loop only calls `enter`. A thread looks once a second. Rank 0's thread writes each time, because the supervisor
reads its progress there. The others write only if their rank stays in a phase for twice as long as in the slowest
recent one, so of a thousand healthy ranks usually one writes.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import sys
import threading
import time
from collections import defaultdict, deque
from pathlib import Path
from types import FrameType
from typing import Any

import torch.distributed as dist
from torch._C import _distributed_c10d as c10d

from dtrain.runs.protocol import POSITION_FILE, pid_namespace
from dtrain.train.process import log

BEAT_S = 1.0
STILL_S = 2.0  # a phase that takes less is no standstill
LATEST_S = 15.0  # a phase that takes longer is treated as one
MOST_STILL_S = 30.0  # longest time between two writes of a standstill
RECENT = 100  # phases of a kind whose slowest counts
FRAMES = 60  # of each thread
CALLS = 512  # newest collectives of each group that are listed


class Position:
    """`phase` and `step` are set by the loop and read by the thread."""

    def __init__(self, run_dir: Path, rank: int) -> None:
        self.path = run_dir / POSITION_FILE.format(rank)
        self.rank, self.phase, self.step, self.moves = rank, "start", 0, 0
        self.hang_timeout: float | None = None  # the setting, once it is known
        process = {"pid": os.getpid(), "host": socket.gethostname(), "pid_namespace": pid_namespace()}
        self._process: dict[str, Any] = {"rank": rank, **process}
        self._since = time.perf_counter()
        self._times: dict[str, deque[float]] = defaultdict(lambda: deque([0.0], maxlen=RECENT))
        self._counts: dict[str, int] = defaultdict(int)
        self._ended = threading.Event()
        self._details: dict[str, Any] = {}  # of the standstill that goes on; collecting them takes milliseconds
        self._write()
        self._thread = threading.Thread(target=self._report, name="dtrain-position", daemon=True)
        self._thread.start()

    def enter(self, phase: str, step: int) -> None:
        now = time.perf_counter()
        self._times[self.phase].append(now - self._since)
        self._counts[self.phase] += 1
        self.phase, self.step, self._since = phase, step, now
        self.moves += 1

    def __enter__(self) -> Position:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is not None:  # a failing rank first waits for its running save, then writes its error report
            self.enter("failing", self.step)
            self._ended.set()
            self._thread.join(timeout=2 * BEAT_S)  # it would write again, without the collectives
            self._details = {"groups": self._groups()}  # the supervisor compares what the ranks have called
            self._write()

    def end(self) -> None:
        self._ended.set()

    def _report(self) -> None:
        seen, still, due = -1, 0.0, STILL_S
        while not self._ended.wait(BEAT_S):
            still += BEAT_S
            if self.moves != seen:
                seen, still, due, self._details = self.moves, 0.0, self._due(), {}
            elif still >= due:
                due = still + min(still, MOST_STILL_S)
                self._details = {"threads": stacks(), "groups": self._groups()}
            elif self.rank > 0:
                continue
            if self.rank == 0 or self._details:
                self._write()

    def _groups(self) -> dict[str, Any]:
        try:
            return groups()
        except Exception:  # what it reads is private to torch: another version may differ, and a group may just end
            log.exception("the collectives of this rank could not be read")
            return {}

    def _due(self) -> float:
        """Seconds in the current phase after which it counts as a standstill."""
        latest = min(LATEST_S, self.hang_timeout / 2 if self.hang_timeout else LATEST_S)
        return min(max(STILL_S, 2 * max(self._times[self.phase])), latest)

    def _write(self) -> None:
        times = {phase: list(some) for phase, some in list(self._times.items())}
        content = self._process | {
            "moves": self.moves, "phase": self.phase, "step": self.step,
            "still_s": time.perf_counter() - self._since, "counts": dict(self._counts),
            "slowest": {phase: max(some) for phase, some in times.items()}, **self._details,
        }  # fmt: skip
        # In place, not by a rename: that would change the folder's mtime, and the supervisor would list it. First the
        # new text, then its length: on a full disk the old text stays.
        with contextlib.suppress(OSError), open(os.open(self.path, os.O_WRONLY | os.O_CREAT, 0o600), "wb") as file:
            file.write(json.dumps(content).encode())
            file.truncate()


def groups() -> dict[str, dict[str, Any]]:
    """The process groups of this rank: members, collectives begun, the newest, and those that have not ended."""
    if not dist.is_initialized():
        return {}
    world = dist.distributed_c10d._world
    members = {world.pg_names.get(group): world.pg_group_ranks.get(group) for group in list(world.pg_map)}
    found: dict[str, dict[str, Any]] = {}
    # torch's flight recorders, one for gloo and one for NCCL, record by default; gloo's send and recv are in none
    for name in ("_dump_fr_trace_json", "_dump_nccl_trace_json"):
        dump = getattr(c10d, name, None)
        recorded = json.loads(dump(includeCollectives=True, onlyActive=False)) if dump else {}
        for entry in recorded.get("entries", []):
            backend, _, op = entry["profiling_name"].partition(":")
            ranks = members.get(entry["process_group"][0])
            if ranks is None or entry["is_p2p"]:
                continue
            # a group with both backends counts the collectives of each
            group = found.setdefault(
                f"{entry['process_group'][0]} {backend}", {"ranks": sorted(ranks), "begun": 0, "open": [], "calls": []}
            )
            seq, sizes = entry["collective_seq_id"], entry["input_sizes"]
            group["begun"] = max(group["begun"], seq)
            # of the other collectives, each rank may have another size
            shape = f" {','.join(entry['input_dtypes']).lower()}{sizes[0] if len(sizes) == 1 else sizes}"
            call = op + shape if op in ("all_reduce", "broadcast") else op
            group["calls"] = [*group["calls"][1 - CALLS :], [seq, call]]
            if not entry["retired"]:
                group["open"].append({"seq": seq, "op": op, "sizes": sizes})
    return found


def stacks() -> dict[str, list[str]]:
    """`file:line, in function` of each thread's innermost frames, innermost first."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    own = threading.get_ident()
    return {
        names.get(ident, str(ident)): lines(frame) for ident, frame in sys._current_frames().items() if ident != own
    }


def lines(frame: FrameType | None) -> list[str]:
    found: list[str] = []
    while frame is not None and len(found) < FRAMES:
        found.append(f"{frame.f_code.co_filename}:{frame.f_lineno}, in {frame.f_code.co_name}")
        frame = frame.f_back
    return found
