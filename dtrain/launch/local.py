"""A machine without a scheduler: torchrun starts its ranks, and a supervisor here watches them."""

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

from dtrain import causes, file_handles, start
from dtrain import config as configuration
from dtrain.comm import profile
from dtrain.config import TRUST, bad, typed_trust
from dtrain.contract import DONE, PREEMPTED, PREFLIGHT, SOCKETS, short_tmp
from dtrain.launchers import nsys
from dtrain.launchers.supervisor import Supervisor
from dtrain.profile import rules as profiling
from dtrain.rundir import note_attempt, read_summary


class Local:
    """This machine, alone."""

    def __init__(self, nodes: int = 1, processes: int | None = None, max_restarts: int = 0, grace_s: int = 300) -> None:
        if nodes != 1:
            fix = "cluster.nodes=1; for more: cluster=slurm, also without SLURM (cluster.launcher=torchrun)"
            raise bad("cluster.nodes", nodes, "cluster=local is one machine", fix)
        self.max_restarts, self.grace_s = max_restarts, grace_s

    def _torchrun(self, config: dict[str, Any]) -> Torchrun:
        # the address in place of the host's name: one that does not resolve costs ten minutes of silence
        place = ["--standalone", "--local-addr=127.0.0.1"]
        return Torchrun(config, place, self.max_restarts, self.grace_s)

    def check(self, config: dict[str, Any]) -> None:
        file_handles.check("cluster.processes", *[config["cluster"]["processes"]] * 2)
        nsys.check(config)
        profiling.check_machine(config)

    def dry_run(self, run_dir: Path, config: dict[str, Any]) -> None:
        self._torchrun(config).dry_run(run_dir)

    def launch(self, run_dir: Path) -> int:
        """Check this machine when asked to, then run to the end; give the exit code."""
        return self._torchrun(configuration.load(run_dir)).launch(run_dir)


class Torchrun(Supervisor):
    """The ranks of this machine, perhaps one node of several: then each has its own torchrun, started by hand."""

    log_name = "torchrun.log"
    folder = ""  # while it runs

    def __init__(
        self, config: dict[str, Any], rendezvous: list[str], max_restarts: int, grace_s: int, node_rank: int = 0
    ) -> None:
        self.config, self.rendezvous, self.node_rank = config, rendezvous, node_rank
        if node_rank:
            self.log_name = f"torchrun-{node_rank}.log"
        super().__init__(config["cluster"]["processes"], max_restarts, grace_s)

    def command(self, run_dir: Path) -> list[str]:
        torchrun = [sys.executable, "-P", "-m", "torch.distributed.run", *self.rendezvous]
        rank = start.command("dtrain.rank")[1:]  # torchrun says which Python
        ranks = [*torchrun, f"--nproc-per-node={self.num_ranks}", *rank, str(run_dir)]
        return nsys.around(self.config, run_dir, f"node-{self.node_rank}", ranks)

    def environment(self) -> dict[str, str]:
        wanted = profile.environment(self.config, os.environ) | start.environment()
        if typed_trust():
            wanted[TRUST] = ",".join(typed_trust())
        if self.folder:
            wanted |= {SOCKETS: self.folder, "PET_LOG_DIR": os.environ.get("PET_LOG_DIR", self.folder)}
        return wanted

    def dry_run(self, run_dir: Path) -> None:
        for name, value in self.environment().items():
            print(f"export {name}={profile.quote(value)}")
        print(shlex.join(self.command(run_dir)))

    def launch(self, run_dir: Path) -> int:
        check = configuration.build(self.config["preflight"])
        if check.level != "off":
            from dtrain.comm.preflight import local_starter

            report = check.run(self.config, run_dir, [socket.gethostname()], local_starter, print)
            if not report.ok:
                return PREFLIGHT
        nsys.prepare(self.config, run_dir)
        # for what the ranks' processes and torchrun itself would leave behind
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

    def killed_ranks(self, said: str) -> list[tuple[int, str]]:
        return killed_ranks(said)


def killed_ranks(torchrun_log: str) -> list[tuple[int, str]]:
    """(rank, signal) of the ranks that torchrun saw die of a signal."""
    found = re.findall(r"rank\s*:\s*(\d+).*?\n.*?exitcode\s*:\s*-(\d+)", torchrun_log)
    # SIGTERM is torchrun ending the others
    return [(int(rank), signal.Signals(int(n)).name) for rank, n in found if int(n) != signal.SIGTERM]
