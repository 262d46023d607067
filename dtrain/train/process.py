"""What surrounds the loop in each rank: log file, process group, stop requests, and the failure report."""

from __future__ import annotations

import contextlib
import hashlib
import logging
import math
import os
import random
import re
import signal
import socket
import struct
import sys
import time
import traceback
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

import dtrain
from dtrain.config import run_file
from dtrain.config.files import GROUPS, SEVERAL, TARGET, sections
from dtrain.config.redaction import hide
from dtrain.config.source_files import names_under_main
from dtrain.errors import bad
from dtrain.runs import causes, source_lines
from dtrain.runs.folder import write_json
from dtrain.runs.protocol import ELASTIC, STOP_FILE, STOP_SIGNALS, note_leave
from dtrain.train.hints import hint, near_name
from dtrain.util import collective, disk_space
from dtrain.util.format import short_path

log = logging.getLogger("dtrain")
VOTE_S = 0.1  # approximate seconds between stop votes; callers tolerate a few seconds
LONG_STEP_S = 1.0  # a stop must not wait for two of these: cluster.grace_s may be short
MOST_STEPS = 10  # most steps between two votes, because steps can suddenly become slow
Vote = tuple[Tensor, dist.Work | None]


class Redacted(logging.Formatter):
    """Format a log line and its traceback without the values of secret-like variables."""

    def format(self, record: logging.LogRecord) -> str:
        return hide(super().format(record))


def redirect_output(run_dir: Path, rank: int) -> None:
    """Send this rank's stdout and stderr, including those of C++ code, to logs/rank-N.log."""
    # the launcher has already created the folder, so that a thousand ranks need not
    descriptor = os.open(run_dir / "logs" / f"rank-{rank}.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    logging.basicConfig(level=logging.INFO, stream=sys.stderr, force=True)
    logging.getLogger().handlers[0].setFormatter(Redacted("%(asctime)s %(levelname)s %(message)s"))
    log.info("rank %d, process %d on %s", rank, os.getpid(), socket.gethostname())  # the supervisor waits for this line


def join_process_group(deterministic: bool = False) -> torch.device:
    """Join the group that RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT describe; return this rank's device.

    One group uses gloo for CPU tensors and NCCL for CUDA tensors. NCCL refuses two ranks on one GPU; in that case gloo
    carries both.
    """
    local_rank, local_size = int(os.environ["LOCAL_RANK"]), int(os.environ["LOCAL_WORLD_SIZE"])
    num_gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if num_gpus == 0:
        dist.init_process_group("gloo")
        return torch.device("cpu")
    device = torch.device("cuda", local_rank % num_gpus)
    torch.cuda.set_device(device)
    if deterministic:  # without it, a resume at 1024 tokens differed in the last bits
        if os.environ.get("CUBLAS_WORKSPACE_CONFIG") not in (":4096:8", ":16:8"):  # torch refuses all others
            os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"
        torch.use_deterministic_algorithms(True)  # not warn_only: bf16 attention would warn and differ
        # we never read uninitialized memory, so torch need not fill it
        torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    else:
        torch.backends.cudnn.benchmark = True  # benchmarks convolutions at the first step; shapes never change
    if local_size > num_gpus:
        log.warning("%d ranks share %d GPUs: NCCL refuses that, so gloo is used, which is slow", local_size, num_gpus)
        dist.init_process_group("gloo")
    else:
        dist.init_process_group("cpu:gloo,cuda:nccl")
    return device


def check_same_start(run_dir: Path, train_set: Any, val_set: Any) -> str:
    """Raise if ranks differ in data, settings or code version; return the data's identity."""
    train, val = (
        "none" if data is None else f"{extent(data)} {getattr(data, 'fingerprint', '')}".strip()
        for data in (train_set, val_set)
    )
    copy = "copy the same files to {host}, or read them from a shared file system"
    if getattr(train_set, "is_stream", False):
        copy = "give every rank the whole stream, which dtrain divides over the ranks: no split by rank, no random seed"
    collective.require_same(
        {
            "config.yaml": (run_file.fingerprint(run_dir), "put run_dir on a file system that all nodes share"),
            "dtrain": (dtrain.__version__, "install the same version on {host}"),
            "torch": (torch.__version__, "install the same version on {host}"),
            "data": (train, copy),
            "data (validation)": (val, copy),
        }
    )
    return train


def extent(data: Any) -> str:
    """How many samples, as a part of the data's identity."""
    return "a stream" if getattr(data, "is_stream", False) else f"{len(data)} samples"


def seed_everything(seed: int, step: int, data_rank: int) -> None:
    """Seed all generators, so that every random draw of a step depends only on (seed, step, data rank)."""
    digest = hashlib.blake2b(f"{seed} {step} {data_rank}".encode(), digest_size=16).digest()
    for_torch, for_others = struct.unpack("<2Q", digest)
    torch.default_generator.manual_seed(for_torch)  # torch.manual_seed seeds every backend: 0.1 ms
    if torch.cuda.is_initialized():
        torch.cuda.manual_seed(for_torch)
    np.random.seed(for_others % 2**32)
    random.seed(for_others)


class StopRequest:
    """Signals and the stop file only set a flag. The ranks vote, so that all stop after the same step.

    Short steps do not vote every time, but about every VOTE_S seconds: a vote of two ranks took 150 µs, and checking
    for the file 20 µs. Each vote also all-reduces the longest step time, so all ranks compute the same number of steps
    until the next vote.
    """

    def __init__(self, run_dir: Path) -> None:
        # one rank per node checks the file: ranks share the kernel's cache of a network file system
        self.run_dir = run_dir
        self.file = run_dir / STOP_FILE if os.environ.get("LOCAL_RANK", "0") == "0" else None
        self.requested = False
        self.voted = -math.inf  # time of the last vote; -inf makes steps before the first vote count as long
        self.steps = 0  # since the last vote
        self.interval = 1  # steps from the last vote to the next
        self.steps_late = 0  # steps from a vote's start to its end, where the ranks are not at the same step
        self.ranks_meet = True  # in every step: then another vote after it makes no rank wait longer
        self.started: deque[Vote | None] = deque()
        for number in STOP_SIGNALS:
            signal.signal(number, self._on_signal)

    def _on_signal(self, number: int, frame: object) -> None:
        self.requested = True
        note_leave(self.run_dir, int(os.environ["RANK"]))

    def start_vote(self, carried: Callable[[], list[float]] = list) -> Vote | None:
        """Before a step: start a vote if one is due. Its all-reduce overlaps with the step. Return the vote to read.

        `carried`: more values whose maximum over the ranks is needed now and then; as many on each rank.
        """
        self.started.append(self._start(carried))
        return self.started.popleft() if len(self.started) > self.steps_late else None

    def _start(self, carried: Callable[[], list[float]]) -> Vote | None:
        self.steps += 1
        if self.steps < self.interval:
            return None
        now = time.perf_counter()
        asked = float(self.requested or (self.file is not None and self.file.exists()))
        # float64: in a list of collectives, no other one looks like it
        vote = torch.tensor([asked, (now - self.voted) / self.steps, *carried()], dtype=torch.float64)
        self.voted, self.steps = now, 0
        return vote, dist.all_reduce(vote, dist.ReduceOp.MAX, async_op=True) if dist.get_world_size() > 1 else None

    def read_vote(self, vote: Vote | None) -> bool:
        """After the step: return whether the run stops here."""
        if vote is None:
            return self._requested_alone()
        sums, work = vote
        if work is not None:
            try:
                work.wait()
            except RuntimeError:  # a peer is gone: the step is over, and the next one's collectives raise it again
                if ELASTIC not in os.environ:
                    raise
                return False
        asked, step_s = sums[:2].tolist()
        self.interval = max(1, min(MOST_STEPS, int(VOTE_S / step_s)))
        if work is not None and step_s >= LONG_STEP_S and self.ranks_meet and not self.steps_late and not asked:
            asked = self._requested_meanwhile()
        return bool(asked) or self._requested_alone()

    def _requested_alone(self) -> bool:
        """A single rank need not wait for a vote."""
        return self.requested and dist.get_world_size() == 1

    def _requested_meanwhile(self) -> float:
        """After a long step: was a stop requested while it ran? The next vote would end a whole step later."""
        asked = torch.tensor([float(self.requested)], dtype=torch.float64)
        try:
            dist.all_reduce(asked, dist.ReduceOp.MAX)
        except RuntimeError:  # as in read_vote
            if ELASTIC not in os.environ:
                raise
            return 0.0
        return float(asked)


def explained(error: BaseException) -> BaseException:
    """Turn a torch error caused by one of our settings into a message about that setting."""
    found = re.search(r"([\w.:]+)(?: CUDA| with [^\n]*?)? does not have a deterministic implementation", str(error))
    if found is None:
        return error
    rule = f"{found[1]} has no deterministic kernel"
    refused = bad("deterministic", True, rule, "deterministic=false, or use another operation in the model")
    refused.__cause__ = error
    return refused


def message(error: BaseException, run_dir: Path) -> str:
    """The error's text, with what to do about it if that is known."""
    text = as_typed(disk_space.explain(error, run_dir), run_dir)
    if printed := causes.sentence_of_exit(error):
        alone = 'the ranks import this file without its arguments: parse them under `if __name__ == "__main__":`'
        return f"{printed}\n  fix: {alone}"
    todo = ""
    if "ix: " not in text:
        with contextlib.suppress(Exception):  # the error itself is what matters
            todo = hint(error) or under_main(error) or near_name(error)
    return f"{text}\n  fix: {todo}" if todo else text


def under_main(error: BaseException) -> str:
    """Return the fix for a name that a script sets only in the block that the ranks do not run."""
    if type(error) is not NameError:  # an UnboundLocalError is about another name
        return ""
    frames = causes.own_frames(error)
    line = names_under_main(frames[-1]["file"]).get(str(error.name)) if frames else None
    if line is None:
        return ""
    where = f"{short_path(Path(frames[-1]['file']))}:{line}"
    return f'{where} sets it under `if __name__ == "__main__":`, which the ranks do not run: move it above that block'


def as_typed(text: str, run_dir: Path) -> str:
    """Name the user's own code as it was typed, data=net.Points, where an error names the class it deals with."""
    found = re.match(r"(?:(\w+)=)?([\w.…]+): ", text)
    with contextlib.suppress(OSError, ValueError):
        choices = run_file.load(run_dir).get("choices", {}) if found else {}
        own = {k: v for k, v in choices.items() if k not in SEVERAL and isinstance(v, str) and "." in v}
        # an error of an import names the target alone
        named = found[1] if found and found[1] != TARGET else None
        group = next((named or k for k, v in own.items() if k == named or v == found[2]), "") if found else ""
        if found and group in own:
            return f"{group}={own[group]}: {text[found.end() :]}"
    return text


def objects_of(run_dir: Path, error: BaseException) -> list[str]:
    """Return what of the user's dtrain was using, as data=net.points, net.py:12: of an error without a line of it."""
    with contextlib.suppress(Exception):  # the error itself is what matters
        config = run_file.load(run_dir)
        choices = config.get("choices", {}).items()
        chosen = [(group, str(name)) for group, name in choices if group in GROUPS and group not in SEVERAL]
        # the choice of a hook is the name of its section
        listed = [(g, str(s.get(TARGET))) for g in SEVERAL if config.get(g) for s in sections(config, g).values()]
        own = [(g, name) for g, name in chosen + listed if "." in name and not name.startswith("dtrain.")]
        groups = {group for group, _ in own}
        used = next((some for some in causes.groups_of(error) if groups & {*some}), tuple(groups))
        return [described(group, name) for group, name in own if group in used]
    return []


def described(group: str, name: str) -> str:
    """Return `data=net.points, net.py:12`."""
    module, _, attribute = name.rpartition(".")
    found = source_lines.source(getattr(sys.modules.get(module), attribute, None))
    return f"{group}={name}" + (f", {short_path(Path(found[0]))}:{found[1].lineno}" if found else "")


def report_failure(run_dir: Path, rank: int, error: BaseException, exit_code: int) -> None:
    """Write a failure note for the launcher, which reports the earliest of all ranks' notes as the cause."""
    log.error("rank %d failed", rank, exc_info=error)
    note = {
        "time": time.time(), "rank": rank, "type": type(error).__name__, "exit_code": exit_code,
        "message": message(error, run_dir), "where": causes.own_line(error),
        "frames": (frames := causes.own_frames(error)), "objects": [] if frames else objects_of(run_dir, error),
        "lost_peer": causes.is_lost_peer(error), "change": getattr(error, "change", {}),
        "log": f"logs/rank-{rank}.log", "traceback": "".join(traceback.format_exception(error)),
    }  # fmt: skip
    with contextlib.suppress(OSError):
        os.close(0)  # stdin, never read: without file handles left, the report needs one
    try:
        write_json(run_dir / "logs" / f"failure-{rank}.json", note)
    except OSError as full:  # then the log above is the only record
        log.error("and the error report could not be written: %s", full)
