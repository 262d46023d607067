"""What torchrun, Lightning and accelerate print for the same faults.

    python benchmarks/fault_peers.py [--tools torchrun lightning accelerate] [--jobs 4] [--limit 60] [--json FILE]

Each tool trains the same small model under DDP with three processes on the CPU; at step 11 one of the injectors of
dtrain/faults happens in rank 1. Recorded: whether the tool ended within the limit, the rank that it names first, and
the last lines of what it printed.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks")]
KINDS = ("exception", "sys-exit", "exit-0", "exit-7", "kill", "segfault", "abort", "no-memory", "io-error",
         "connections", "sleep", "loop", "global-lock", "stop", "read", "extra-collective", "other-shape")  # fmt: skip
WHO, STEP, STEPS, RANKS = 1, 11, 30, 3


def happen(step: int, rank: int) -> None:
    """Called by each tool's loop."""
    from dtrain.faults.inject import FAULTS

    if step == STEP and rank == WHO:
        FAULTS[os.environ["KIND"]](True, None)


def plain() -> None:
    import torch
    import torch.distributed as dist

    dist.init_process_group("gloo")
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(16, 16))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for step in range(STEPS):
        happen(step, dist.get_rank())
        loss = model(torch.randn(4, 16)).square().mean()
        loss.backward()
        dist.all_reduce(loss.detach().reshape(1))  # the logged loss
        optimizer.step()
        optimizer.zero_grad()


def of_accelerate() -> None:
    import torch
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    model = torch.nn.Linear(16, 16)
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), 0.1))
    for step in range(STEPS):
        happen(step, accelerator.process_index)
        loss = model(torch.randn(4, 16)).square().mean()
        accelerator.backward(loss)
        accelerator.reduce(loss.detach().reshape(1))
        optimizer.step()
        optimizer.zero_grad()


def of_lightning() -> None:
    import lightning
    import torch

    class Net(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.layer = torch.nn.Linear(16, 16)

        def training_step(self, batch: Any, step: int) -> Any:
            happen(step, self.global_rank)
            loss = self.layer(batch).square().mean()
            self.log("loss", loss, sync_dist=True)
            return loss

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), 0.1)

    data = torch.utils.data.DataLoader(torch.randn(4 * STEPS * RANKS, 16), batch_size=4)
    trainer = lightning.Trainer(accelerator="cpu", devices=RANKS, strategy="ddp", max_epochs=1, logger=False,
                                enable_checkpointing=False, enable_progress_bar=False)  # fmt: skip
    trainer.fit(Net(), data)


TOOLS = {"torchrun": plain, "lightning": of_lightning, "accelerate": of_accelerate}
COMMANDS = {
    "torchrun": ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={RANKS}"],
    "lightning": [],  # it starts its processes by itself
    # --multi_gpu: its launcher for several processes, torch.distributed.run; with --cpu it would start only one
    "accelerate": ["-m", "accelerate.commands.launch", "--multi_gpu", f"--num_processes={RANKS}", "--num_machines=1",
                   "--mixed_precision=no", "--dynamo_backend=no"],
}  # fmt: skip


def kill_all(case: str) -> None:
    """Kill the processes of one launch, by their environment."""
    for path in Path("/proc").glob("[0-9]*/environ"):
        with contextlib.suppress(OSError):
            if f"CASE={case}".encode() in path.read_bytes().split(b"\0"):
                os.kill(int(path.parent.name), signal.SIGKILL)


def one(tool: str, kind: str, limit: float) -> dict[str, Any]:
    env = os.environ | {"KIND": kind, "TOOL": tool, "CASE": f"{os.getpid()}-{tool}-{kind}"}
    env |= {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "ACCELERATE_USE_CPU": "true"}
    began = time.monotonic()
    more = [f"--main_process_port={29600 + KINDS.index(kind)}"] if tool == "accelerate" else []
    env |= {"MASTER_PORT": str(29700 + KINDS.index(kind))} if tool == "lightning" else {}
    with tempfile.TemporaryFile() as screen:
        process = subprocess.Popen(
            [sys.executable, *COMMANDS[tool], *more, __file__], env=env, stdin=subprocess.DEVNULL, stdout=screen,
            stderr=subprocess.STDOUT,
        )  # fmt: skip
        try:
            process.wait(limit)
            ended = time.monotonic() - began
        except subprocess.TimeoutExpired:
            ended = None
        kill_all(env["CASE"])  # torchrun's processes have sessions of their own
        process.wait()
        screen.seek(0)
        output = screen.read().decode(errors="replace")
    root = output.rpartition("Root Cause")[2] if "Root Cause" in output else ""
    found = re.search(r"rank\s*:\s*(\d+)", root) or re.search(r"\[rank(\d+)\]", output)
    lines = [line for line in output.splitlines() if line.strip()]
    return {
        "tool": tool, "kind": kind, "exit_code": process.returncode if ended else None, "ended_after_s": ended,
        "rank_named": int(found[1]) if found else None, "last_lines": lines[-14:],
    }  # fmt: skip


def main() -> None:
    from throughput import environment

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tools", nargs="+", default=list(TOOLS))
    parser.add_argument("--kinds", nargs="+", default=list(KINDS))
    parser.add_argument("--jobs", type=int, default=4)
    parser.add_argument("--limit", type=float, default=60.0)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    cases = [(tool, kind) for tool in options.tools for kind in options.kinds]
    with ThreadPoolExecutor(options.jobs) as pool:
        rows = list(pool.map(lambda case: one(*case, options.limit), cases))
    for row in rows:
        ended = f"{row['ended_after_s']:.0f} s" if row["ended_after_s"] else f"not within {options.limit:.0f} s"
        print(f"{row['tool']:<11} {row['kind']:<17} {ended:<16} rank named: {row['rank_named']}")
    if options.json:
        content = {"benchmark": "fault_peers", **environment(), "rank": WHO, "limit_s": options.limit, "rows": rows}
        options.json.write_text(json.dumps(content, indent=1) + "\n")


if __name__ == "__main__":
    if tool := os.environ.get("TOOL"):
        TOOLS[tool]()
    else:
        main()
