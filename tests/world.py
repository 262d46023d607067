"""Real worlds for tests: a run folder composed from the real conf/, and ranks that train in it on gloo.

Ranks are forked from a server that has imported torch once, so a world of four starts in a fraction of a second.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import socket
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from hydra import compose, initialize_config_dir

from dtrain.config import CONF, save
from dtrain.launch import resolve

ROOT = Path(__file__).parent.parent

# The smallest model that has every part, in a run of milliseconds a step.
SMALL = [
    "model.num_layers=2", "model.dim=32", "model.num_heads=4", "model.vocab_size=61", "model.vocab_multiple=16",
    "model.seq_len=16", "data=synthetic", "train.steps=20", "train.global_batch_size=8", "train.eval_batches=0",
    "checkpoint.every=0", "schedule.warmup_steps=5", "optim.lr=3e-3",
]  # fmt: skip

_server = multiprocessing.get_context("forkserver")
_server.set_forkserver_preload(
    ["torch._dynamo", "dtrain.train", "dtrain.strategies.ddp", "dtrain.strategies.fsdp", "dtrain.sample"]
)


def make_run(run_dir: Path, *overrides: str) -> Path:
    """A run folder as the launcher would write it, from SMALL and more overrides."""
    with initialize_config_dir(str(CONF), version_base="1.3"):
        # a folder that holds a run already is refused to users; tests change a run's configuration under it
        cfg = compose("config", [*SMALL, f"run_dir={run_dir}/new", *overrides], return_hydra_config=True)
        config = resolve(cfg) | {"run_dir": str(run_dir)}
    (run_dir / "logs").mkdir(parents=True, exist_ok=True)
    save(run_dir, config)
    return run_dir


class World:
    """N ranks that run `function(*arguments)`; each has the launcher's environment contract."""

    def __init__(
        self, size: int, function: Callable[..., Any], *arguments: Any, env: dict[str, str] | None = None
    ) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        shared = {
            "WORLD_SIZE": str(size),
            "LOCAL_WORLD_SIZE": str(size),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
        }
        shared |= {"OMP_NUM_THREADS": "1", **(env or {})}
        self.ranks = [
            _server.Process(
                target=_rank, args=(function, arguments, shared | {"RANK": str(r), "LOCAL_RANK": str(r)}), daemon=True
            )
            for r in range(size)
        ]
        for process in self.ranks:
            process.start()

    def join(self, timeout: float = 120) -> list[int | None]:
        """Wait for all ranks; their exit codes."""
        deadline = time.monotonic() + timeout
        for process in self.ranks:
            process.join(max(0.0, deadline - time.monotonic()))
        codes = [process.exitcode for process in self.ranks]
        self.kill()
        return codes

    def kill(self) -> None:
        for process in self.ranks:
            process.kill()
        for process in self.ranks:
            process.join()


def _rank(function: Callable[..., Any], arguments: tuple[Any, ...], env: dict[str, str]) -> None:
    import torch

    os.environ |= env
    torch.set_num_threads(1)
    code = function(*arguments)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code or 0)


def train(run_dir: Path, size: int = 1, env: dict[str, str] | None = None) -> list[int | None]:
    """Train the run with `size` ranks to its end; exit codes. A rank's failure is printed."""
    codes = start(run_dir, size, env).join()
    for note in sorted((run_dir / "logs").glob("failure-*.json")):
        print(json.loads(note.read_text())["traceback"])
    return codes


def start(run_dir: Path, size: int = 1, env: dict[str, str] | None = None) -> World:
    return World(size, _train_main, run_dir, env=env)


def _train_main(run_dir: Path) -> int:
    from dtrain.train import main

    return main(run_dir)


def spawn(size: int, function: Callable[..., Any], *arguments: Any) -> None:
    """Run a collective test function on `size` ranks of one process group; fail if one of them fails."""
    assert World(size, _in_group, function, *arguments).join() == [0] * size


def _in_group(function: Callable[..., Any], *arguments: Any) -> int:
    import torch.distributed as dist

    dist.init_process_group("gloo")
    function(*arguments)
    dist.barrier()
    dist.destroy_process_group()
    return 0


def metrics(run_dir: Path) -> list[dict[str, Any]]:
    path = run_dir / "metrics.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines() if line.endswith("}")] if path.exists() else []


def losses(run_dir: Path) -> dict[int, float]:
    return {m["step"]: m["loss"] for m in metrics(run_dir) if "loss" in m}


def summary(run_dir: Path) -> dict[str, Any]:
    result: dict[str, Any] = json.loads((run_dir / "summary.json").read_text())
    return result
