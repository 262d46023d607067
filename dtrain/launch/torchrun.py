"""torchrun starts the ranks of this machine, and a supervisor monitors them."""

from __future__ import annotations

import os
import re
import shlex
import signal
import socket
import sys
import tempfile
from pathlib import Path
from typing import Any

from dtrain import start
from dtrain.config.build import TRUST, build, typed_trust
from dtrain.launch import nsys
from dtrain.launch.supervisor import Supervisor, hang_settings, rank_module
from dtrain.preflight import network_env
from dtrain.runs import causes
from dtrain.runs.folder import note_attempt, read_summary
from dtrain.runs.protocol import BAD_CONFIG, DONE, FAILED, PREEMPTED, PREFLIGHT, SOCKETS, short_tmp

OWN_CODES = (1, BAD_CONFIG, FAILED, PREEMPTED)  # 1: Python itself failed, and its traceback is in torchrun's log


class Torchrun(Supervisor):
    """The ranks of this machine, which may be one node of several, each with its own torchrun, started by hand."""

    log_name = "torchrun.log"
    ends_copies = True
    folder = ""  # temporary folder, set while it runs

    def __init__(
        self, config: dict[str, Any], rendezvous: list[str], max_restarts: int, grace_s: int, node_rank: int = 0
    ) -> None:
        self.config, self.rendezvous, self.node_rank = config, rendezvous, node_rank
        if node_rank:
            self.log_name = f"torchrun-{node_rank}.log"
        cluster = config["cluster"]
        super().__init__(cluster["processes"], max_restarts, grace_s, *hang_settings(cluster))
        self.world_size, self.is_one_host = cluster["processes"] * cluster["nodes"], cluster["nodes"] == 1

    def command(self, run_dir: Path) -> list[str]:
        torchrun = [sys.executable, "-P", "-m", "torch.distributed.run", *self.rendezvous]
        rank = start.command(rank_module(self.config))[1:]  # [1:]: torchrun chooses the Python
        ranks = [*torchrun, f"--nproc-per-node={self.num_ranks}", *rank, str(run_dir)]
        return nsys.around(self.config, run_dir, f"node-{self.node_rank}", ranks)

    def environment(self) -> dict[str, str]:
        wanted = network_env.environment(self.config, os.environ) | start.environment()
        if typed_trust():
            wanted[TRUST] = ",".join(typed_trust())
        if self.folder:
            wanted |= {SOCKETS: self.folder, "PET_LOG_DIR": os.environ.get("PET_LOG_DIR", self.folder)}
        return wanted

    def dry_run(self, run_dir: Path) -> None:
        for name, value in self.environment().items():
            print(f"export {name}={network_env.quote(value)}")
        print(shlex.join(self.command(run_dir)))

    def launch(self, run_dir: Path) -> int:
        check = build(self.config["preflight"])
        if check.level != "off":
            from dtrain.preflight.run import local_starter

            report = check.run(self.config, run_dir, [socket.gethostname()], local_starter, print)
            if not report.ok:
                return PREFLIGHT
        nsys.prepare(self.config, run_dir)
        # for files that the ranks and torchrun itself would leave behind
        with tempfile.TemporaryDirectory(prefix="dtrain-", dir=short_tmp(), ignore_cleanup_errors=True) as folder:
            self.folder = folder
            if self.node_rank:
                return self.supervise(run_dir)
            note_attempt(run_dir, "start", **self.place())
            code = self.supervise(run_dir)
            ended = read_summary(run_dir).get("status", "")
            why = ended if code in (DONE, PREEMPTED) else causes.one_line(self.failure)
            note_attempt(run_dir, "end", code=code, why=why)
            return code

    def place(self) -> dict[str, Any]:
        return {"nodes": [socket.gethostname()]}

    def killed_ranks(self, output: str) -> list[tuple[int, str]]:
        return killed_ranks(output)

    def ended_well(self, output: str) -> list[int]:
        """Ranks that ended with 0 in an attempt that failed: torchrun lists all others."""
        listed = {int(rank) for rank in re.findall(r"rank\s*:\s*(\d+) \(local_rank", output)}
        return [rank for rank in range(self.world_size) if rank not in listed] if listed and self.is_one_host else []


def killed_ranks(torchrun_log: str) -> list[tuple[int, str]]:
    """(rank, signal) of the ranks that died from a signal, according to torchrun; the one that it saw first, first."""
    later, _, first = torchrun_log.rpartition("Root Cause (first observed failure)")
    found = re.findall(r"rank\s*:\s*(\d+).*?\n.*?exitcode\s*:\s*(-?\d+)", first + later)
    # torchrun sends SIGTERM to end the other ranks
    return [(int(rank), ended(int(n))) for rank, n in found if int(n) not in (-signal.SIGTERM, *OWN_CODES)]


def ended(code: int) -> str:
    return signal.Signals(-code).name if code < 0 else f"exit code {code}"
