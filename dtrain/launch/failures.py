"""Which rank failed first, and why: from the ranks' failure notes, the launcher's log, and what the ranks called."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from dtrain.launch import hang
from dtrain.launch.wait_graph import first_difference
from dtrain.runs.causes import GLOO
from dtrain.runs.folder import last_lines
from dtrain.runs.protocol import FAILED, HANG_FILE, POSITION_FILE
from dtrain.util import disk_space


def first_failure(
    run_dir: Path, killed: Sequence[tuple[int, str]] = (), ended: Sequence[int] = ()
) -> dict[str, Any] | None:
    """Find the rank that failed first, and why: from the ranks' failure notes, or from the launcher's log.

    A killed rank leaves no note, but its peers report the lost connection; then the killed rank is named.
    ended: the ranks whose processes had ended when the first note was seen.
    """
    found = [(p.stat().st_mtime_ns, json.loads(p.read_text())) for p in (run_dir / "logs").glob("failure-*.json")]
    # sort by the file server's clock: the clocks of two nodes may differ by more than the time between two failures
    found.sort(key=lambda one: (one[0], one[1]["time"]))
    notes = [note for _, note in found]
    own = [note for note in notes if not note.get("lost_peer")]
    if own:
        return dict(own[0]) | named_by(own[0])
    for rank, name in killed:
        mapped = (
            f": a mapped file was truncated, or shared memory was full. If it was full: {disk_space.shared_memory()}"
        )
        hint = {"SIGKILL": " (out of memory?)", "SIGBUS": mapped}.get(name, "")
        how = (
            f"was killed by {name}{hint}" if name.startswith("SIG") else f"ended with {name} and wrote no error report"
        )
        return failure(rank, name, f"the process {how}", f"logs/rank-{rank}.log")
    reported = {note["rank"] for note in notes}
    for rank in ended:
        if rank not in reported:  # exit code 0, for example from os._exit: no launcher reports that
            how = "the process ended before the run did, and wrote no error report"
            return failure(rank, "early exit", how, f"logs/rank-{rank}.log")
    return dict(notes[0]) if notes else None


def named_by(note: dict[str, Any]) -> dict[str, Any]:
    """If all ranks compared something and report the same rank as different: that rank, not the first to report it."""
    words = "differs from its replicas|has |held |computed "
    found = re.search(rf"(?:step \d+|on all ranks): rank (\d+) \([^)]*\) (?:{words})", str(note["message"]))
    return {"rank": int(found[1]), "log": f"logs/rank-{found[1]}.log"} if found else {}


def mismatch(run_dir: Path, first: dict[str, Any], num_ranks: int) -> dict[str, Any] | None:
    """If the failure is a consequence of collectives that did not fit together, return that as the failure.

    gloo then aborts a process, loses connections, or adds up the wrong numbers; who is hit first is chance.
    """
    log = run_dir / "logs" / f"rank-{first['rank']}.log"
    aborted = first["type"] == "SIGABRT" and "gloo::EnforceNotMet" in tail(log)
    of_gloo = first.get("lost_peer") or GLOO.search(str(first["message"]))
    if not (aborted or of_gloo or first["type"] == "NonFiniteError"):
        return None
    positions = {rank: hang.read(run_dir / POSITION_FILE.format(rank)) for rank in range(num_ranks)}
    ranks, called = first_difference(positions)
    if ranks:
        return of_difference(ranks, called)
    if called:
        text = f"the ranks called {' and '.join(sorted(set(called.values())))} in the same place"
        return failure(None, "collective mismatch", text, first["log"])
    if first["type"] == "NonFiniteError":
        # all ranks read the same loss, so all of them raise this error at the same step
        steps = {rank: position["step"] for rank, position in positions.items() if position}
        newest = max(steps.values(), default=0)
        ranks = [rank for rank, step in steps.items() if step == newest]
        if newest == min(steps.values(), default=0) or len(ranks) * 2 >= num_ranks:
            return None
        text = f"it went on to step {newest}, so it did not call a collective that the others called"
        return failure(ranks[0], "collective mismatch", text, f"logs/rank-{ranks[0]}.log")
    return None


def of_difference(ranks: list[int], called: dict[int, str]) -> dict[str, Any]:
    others = sorted({call for rank, call in called.items() if rank not in ranks})
    text = f"it called {called[ranks[0]]} where the others called {' or '.join(others)}"
    return failure(ranks[0], "collective mismatch", text, f"logs/rank-{ranks[0]}.log")


def tail(path: Path, size: int = 65536) -> str:
    """The end of a log."""
    return b"\n".join(last_lines(path, size)).decode(errors="replace")


def is_timeout(failure: dict[str, Any]) -> bool:
    """Is it what a rank reports that waited for another one for too long?"""
    words = re.search(r"timed? ?out|watchdog", str(failure.get("message")), re.I)
    return bool(failure.get("lost_peer") or words) or failure.get("type") == "SIGABRT"  # NCCL's watchdog aborts


def of_standstill(run_dir: Path, found: hang.Standstill) -> dict[str, Any]:
    if len(found.ranks) == 1 and found.positions[found.ranks[0]].get("process") == "ended":
        rank = found.ranks[0]
        if "gloo::EnforceNotMet" in tail(run_dir / "logs" / f"rank-{rank}.log"):  # gloo has aborted a healthy rank
            ranks, called = first_difference(found.positions)
            if ranks and rank not in ranks:
                return of_difference(ranks, called)
    kind = "collective mismatch" if found.differ else "hang"
    return failure(found.ranks[0] if found.ranks else None, kind, str(found), HANG_FILE)


def failure(rank: int | None, kind: str, message: str, log: str) -> dict[str, Any]:
    return {"rank": rank, "type": kind, "message": message, "exit_code": FAILED, "log": log, "traceback": ""}
