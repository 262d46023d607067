"""For your own training program under `script=FILE`: where to save, whether to stop, and metrics.

    from dtrain import script

    path = script.checkpoint_dir() / "model.pt"      # kept when the run is resumed, restarted or queued again
    for step in range(first_step, num_steps):
        ...
        script.log(step, loss=loss.item(), lr=lr)    # in metrics.jsonl, on the screen and in the trackers
        if script.stop_requested():                  # on all ranks, after the same step
            save(path)
            script.exit_stopped()                    # exit code 75: the run can be resumed

A program needs none of this. Without dtrain around it, the functions save to ./checkpoints, never stop, and print.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any, NoReturn

from dtrain.runs.folder import look_again, read_json, write_json
from dtrain.runs.protocol import PREEMPTED, SCRIPT_ASKS, SCRIPT_RUN, SCRIPT_STOP_AT, STOP_FILE
from dtrain.runs.recorder import Recorder

VOTE_S, MOST_CALLS = 0.1, 10  # between two votes on a stop: about this many seconds, and never more calls
_calls = 0  # of stop_requested
_next_vote, _voted = 1, (0, 0.0)  # the call at which the ranks vote next; (call, time) of the last vote
_recorder: Recorder | None = None


def run_dir() -> Path | None:
    """Return the run folder; None: the program was not started by dtrain."""
    return Path(os.environ[SCRIPT_RUN]) if SCRIPT_RUN in os.environ else None


def checkpoint_dir() -> Path:
    """Return the folder for checkpoints, which exists: RUN/checkpoints."""
    folder = (run_dir() or Path()) / "checkpoints"
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def rank() -> int:
    return int(os.environ.get("RANK", "0"))


def stop_requested() -> bool:
    """Return whether to save and exit: a scheduler, `dtrain cancel` or Ctrl-C asked for it.

    All ranks get the same answer, if each calls it as often. With torch.distributed they agree by a small all-reduce,
    about every 0.1 s and at least at every tenth call: calls in between cost nothing. Otherwise rank 0 decides for the
    next call, and the ranks must exchange something between two calls, as the steps of data parallel training do. Once
    it has been called, the program gets no stop signal.
    """
    global _calls
    run, _calls = run_dir(), _calls + 1
    if run is None:
        return False
    if _calls == 1:
        (run / SCRIPT_ASKS.format(rank())).touch()
    dist = getattr(sys.modules.get("torch"), "distributed", None)
    if dist is not None and dist.is_available() and dist.is_initialized():
        return _vote(run, dist)
    return _agreed(run)


def _vote(run: Path, dist: Any) -> bool:
    """All-reduce whether to stop, and the slowest rank's seconds per call: so all ranks know the call of the next vote.

    Between two votes nothing is sent, and with NCCL the host does not wait for the GPU.
    """
    global _next_vote, _voted
    if _calls < _next_vote:
        return False
    import torch

    (call, then), now = _voted, time.monotonic()
    each_s = (now - then) / (_calls - call) if call else VOTE_S
    asked = float((run / STOP_FILE).exists())
    device = "cuda" if dist.get_backend() == "nccl" else "cpu"
    vote = torch.tensor([asked, each_s], dtype=torch.float32, device=device)
    dist.all_reduce(vote, dist.ReduceOp.MAX)
    any_asked, slowest_s = vote.tolist()
    _voted, _next_vote = (_calls, now), _calls + max(1, min(MOST_CALLS, int(VOTE_S / max(slowest_s, 1e-9))))
    return bool(any_asked)


def _agreed(run: Path) -> bool:
    """Rank 0 writes after which call all ranks stop: the next one, which they reach only together."""
    path, asked = run / SCRIPT_STOP_AT, (run / STOP_FILE).exists()
    if rank() == 0 and asked and not path.exists():
        write_json(path, {"call": _calls + 1})
    elif os.environ.get("LOCAL_WORLD_SIZE") != os.environ.get("WORLD_SIZE"):
        look_again(run)  # a network file system may hide a new file for a minute
    return _calls >= (read_json(path).get("call") or _calls + 1)


def exit_stopped() -> NoReturn:
    """Exit as a run that saved because it was asked to stop; it can be resumed."""
    sys.stdout.flush()
    sys.exit(PREEMPTED)


def log(step: int, **metrics: Any) -> None:
    """Append a line to RUN/metrics.jsonl on rank 0; the other ranks do nothing."""
    if rank() != 0:
        return
    step = int(step)
    run, values = run_dir(), {name: plain(value) for name, value in metrics.items()}
    if run is None:
        print(json.dumps({"step": step, **values}), flush=True)
        return
    global _recorder
    _recorder = _recorder or Recorder(run, step - 1)  # a resumed program repeats the steps since its last save
    _recorder.write(step=step, **values)


def plain(value: Any) -> Any:
    """Return a number of numpy or torch as Python's own."""
    return value.item() if hasattr(value, "item") else value
