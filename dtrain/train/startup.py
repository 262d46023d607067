"""The start of a run: what the time until the first step goes to, and what is known about the graphs to compile."""

from __future__ import annotations

import json
import socket
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch.utils import _pytree as pytree

from dtrain.config.files import TARGET
from dtrain.config.run_file import Settings
from dtrain.kernels import compile_cache
from dtrain.runs.folder import last_launch, last_lines, parse_line, read_json
from dtrain.runs.protocol import ATTEMPTS_FILE
from dtrain.start import began as process_began
from dtrain.strategies.base import Strategy
from dtrain.train.pending import FinishedStep
from dtrain.util.collective import gather, rank

# settings that change graphs; torch has keys of its own, so one too few only makes two kinds of runs share a file
GRAPH_SETTINGS = (
    "model", "precision", "loss", "strategy", "lora", "fused_loss", "activation_checkpointing",
    "activation_checkpointing_every", "deterministic",
)  # fmt: skip


class StartTimes:
    """Seconds of each phase from the command to the first step, on this rank; its process has just imported torch."""

    def __init__(self, run_dir: Path) -> None:
        self.seconds: dict[str, float] = {}
        command, attempt = began(run_dir)
        process, now = process_began(), time.time()
        if command is not None and attempt is not None:
            self.seconds["command"] = attempt - command
        if attempt is not None:
            self.seconds["ranks"] = process - attempt  # with torchrun, or the imports of the process that forks them
        self.seconds["imports"] = now - process
        self.last = time.perf_counter()

    def done(self, phase: str) -> None:
        """End a phase; the next one begins."""
        now = time.perf_counter()
        self.seconds[phase], self.last = now - self.last, now

    def first_step(self, first: FinishedStep) -> dict[str, float]:
        """End the first step, whose results have been read; return all phases, and their sum as `total`."""
        self.done("first_step")
        rest = self.seconds.pop("first_step") - first.data_s
        compiling = min(compile_s(), rest)
        self.seconds |= {"first_batch": first.data_s, "compile": compiling, "first_step": rest - compiling}
        # clocks of two hosts may differ by more than a phase takes
        rounded = {phase: round(max(0.0, seconds), 3) for phase, seconds in self.seconds.items()}
        return rounded | {"total": round(sum(rounded.values()), 3)}


def began(run_dir: Path) -> tuple[float | None, float | None]:
    """Return when the command was typed, unless a job waited or was restarted, and when this attempt began."""
    lines = (parse_line(line) for line in last_lines(run_dir / ATTEMPTS_FILE))
    start: dict[str, Any] = next((line for line in reversed(list(lines)) if line.get("event") == "start"), {})
    launch = last_launch(read_json(run_dir / "launch.json"))
    command, attempt = launch.get("began"), start.get("time")
    if not isinstance(attempt, float):
        return None, None
    is_first = isinstance(command, float) and not launch.get("job_id") and "attempt" not in start
    return (command if is_first else None), attempt


def compile_s() -> float:
    """Seconds that this process has spent in torch.compile: tracing, and compiling or loading."""
    timed = getattr(sys.modules.get("torch._dynamo.utils"), "cumulative_time_spent_ns", {})
    return float(sum(timed.get(phase, 0.0) for phase in ("entire_frame_compile", "entire_backward_compile"))) / 1e9


def begin_compile_cache(cfg: Settings, strategy: Strategy, sample: Any) -> None:
    """Load what an earlier run, or another node, has compiled for a run like this one. All ranks must call it."""
    if strategy.compile == "none":
        return
    tensors = [leaf for leaf in pytree.tree_leaves(sample) if isinstance(leaf, torch.Tensor)]
    about = {
        "settings": {name: cfg[name] for name in GRAPH_SETTINGS if name in cfg},
        "optim": cfg.optim[TARGET], "compile": strategy.compile, "mesh": strategy.sizes.as_dict(),
        "part": [strategy.mesh.get_local_rank(axis) for axis in ("pp", "tp")], "device": str(strategy.device),
        "micro_batch_size": strategy.micro_batch_size, "sample": [[str(t.dtype), *t.shape] for t in tensors],
    }  # fmt: skip
    cache = compile_cache.begin(json.loads(json.dumps(about, default=str)))
    mine = (socket.gethostname(), cache and cache.key)
    of_ranks = gather(mine)
    if cache:
        cache.stores = [key for _, key in of_ranks].index(cache.key) == rank()  # one rank of each kind
        # tensor-parallel ranks may communicate while they compile
        cache.takes_turns = of_ranks.count(mine) > 1 and strategy.sizes.tp == 1


def end_compile_cache(strategy: Strategy) -> dict[str, Any]:
    """Store what is new; return what the ranks have compiled and loaded, for summary.json. All ranks must call it."""
    mine = compile_cache.finish()
    if strategy.compile == "none":
        return {}
    of_ranks = gather(mine)
    for name in mine:
        if name.startswith("graphs_"):
            mine[name] = sum(one[name] for one in of_ranks)
        elif name.endswith("_s"):
            mine[name] = max(one.get(name, 0.0) for one in of_ranks)
    return {"compile_cache": mine}
