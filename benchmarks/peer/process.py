"""A peer in a process of its own: started and told by peers.py, measured between gates (feed.py)."""

from __future__ import annotations

import json
import os
import queue
import socket
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
DISTRIBUTED = ("ours", "deepspeed")  # need a process group, also of one rank


class Peer:
    """One process that trains a model with one tool, a block of steps at a time."""

    def __init__(self, spec: dict[str, Any], threads: int) -> None:
        self.name, self.log = spec["peer"], tempfile.TemporaryFile("w+", errors="replace")  # noqa: SIM115
        limits = {"OMP_NUM_THREADS": str(threads), "TORCHINDUCTOR_COMPILE_THREADS": str(threads)}
        self.process = subprocess.Popen(
            [sys.executable, str(ROOT / "benchmarks" / "peers.py"), "--worker", json.dumps(spec)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self.log, text=True, env=os.environ | limits,
        )  # fmt: skip
        self.lines: queue.Queue[str] = queue.Queue()
        threading.Thread(target=self._listen, daemon=True).start()

    def _listen(self) -> None:
        assert self.process.stdout
        for line in self.process.stdout:
            self.lines.put(line)
        self.lines.put("")

    def go(self, untimed: int, timed: int) -> None:
        assert self.process.stdin
        self.process.stdin.write(f"{untimed} {timed}\n")
        self.process.stdin.flush()

    def report(self, timeout_s: float) -> dict[str, Any]:
        """What the block that runs has found; its first is the warm-up, which begins unasked."""
        try:
            line = self.lines.get(timeout=max(1.0, timeout_s))
        except queue.Empty:
            raise RuntimeError(f"no answer within {timeout_s:.0f} s") from None
        if not line:
            raise RuntimeError(self.last_words())
        found: dict[str, Any] = json.loads(line)
        return found

    def last_words(self) -> str:
        self.process.wait(timeout=20)
        self.log.seek(0)
        lines = [line for line in self.log.read().splitlines() if line.strip()]
        return " | ".join(lines[-3:])[-600:] or f"ended with {self.process.returncode}"

    def stop(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()


def work(spec: dict[str, Any]) -> None:
    """Inside the process: train until told to end."""
    sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks"), str(ROOT / "benchmarks" / "planner")]
    from dtrain.config.run_file import Settings
    from dtrain.launch.compose import compose

    settings = compose(spec["words"])
    if spec["loop"] in DISTRIBUTED:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = str(free.getsockname()[1])
        os.environ |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1"}
        os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    if spec["loop"] == "ours":  # as a launched run has it
        from dtrain.preflight.network_env import environment

        os.environ |= environment(settings, os.environ)

    import torch
    from measure import batch_of

    from benchmarks.peer.feed import Feed
    from benchmarks.peer.loops import LOOPS
    from dtrain.train import process

    cfg = Settings(settings)
    if spec["loop"] in DISTRIBUTED:
        device = process.join_process_group(cfg.deterministic and spec["loop"] == "ours")
    else:
        torch.set_float32_matmul_precision("high")  # TF32 where float32 is left
        device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    torch.manual_seed(0)
    batches = [batch_of(cfg, spec["batch"], device) for _ in range(4)]
    LOOPS[spec["loop"]](cfg, Feed(batches, device), device)
    time.sleep(1)
    raise RuntimeError("the loop ended by itself")
