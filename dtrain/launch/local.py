"""Launch on this machine: without GPUs the ranks are forked from one process, else torchrun starts them.

Those of an elastic run are forked in any case, because they change often.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any, Literal

from dtrain.checks import profile as profiling
from dtrain.config import elastic, hardware, run_file
from dtrain.config.files import is_script
from dtrain.config.hardware import gpus_per_node
from dtrain.errors import bad
from dtrain.launch import metrics_server, nsys
from dtrain.launch.forked import Forked
from dtrain.launch.members import Members
from dtrain.launch.torchrun import Torchrun
from dtrain.util import file_handles


class Local:
    """Runs on this machine only."""

    def __init__(
        self,
        nodes: int | str = 1,
        processes: int | str | None = None,
        max_restarts: int = 0,
        grace_s: int = 300,
        hang_timeout: float | None = None,
        on_hang: Literal["stop", "warn"] = "stop",
        system_metrics_every: float = 5,
        metrics_port: int | None = None,
        metrics_host: str = "127.0.0.1",
        fork: bool | Literal["always"] = True,
    ) -> None:
        if nodes != 1:
            fix = "cluster.nodes=1, or cluster=slurm; without SLURM: cluster=slurm cluster.launcher=torchrun run_dir=…"
            raise bad("cluster.nodes", nodes, "cluster=local is one machine", fix)
        self.max_restarts, self.grace_s = max_restarts, grace_s

    def _supervisor(self, config: dict[str, Any]) -> Torchrun:
        if elastic.range_of(config):
            return Forked(config, self.max_restarts, self.grace_s, Members(config))
        if can_fork(config):
            return Forked(config, self.max_restarts, self.grace_s)
        return self._torchrun(config)

    def _torchrun(self, config: dict[str, Any]) -> Torchrun:
        # the address instead of the host name: a name that does not resolve stalls silently for ten minutes
        place = ["--standalone", "--local-addr=127.0.0.1"]
        return Torchrun(config, place, self.max_restarts, self.grace_s)

    def check(self, config: dict[str, Any]) -> None:
        if elastic.range_of(config) and not config["cluster"].get("fork", True):
            fix = "cluster.fork=true, or one number as cluster.processes"
            raise bad("cluster.fork", False, "the ranks of a range are always forked: their number changes", fix)
        file_handles.check("cluster.processes", *[config["cluster"]["processes"]] * 2)
        nsys.check(config)
        metrics_server.check(config["cluster"])
        profiling.check_machine(config)

    def dry_run(self, run_dir: Path, config: dict[str, Any]) -> None:
        if not elastic.range_of(config) and can_fork(config):
            print("# dtrain forks the ranks from one process; torchrun starts the same ranks:")
            self._torchrun(config).dry_run(run_dir)
        else:
            self._supervisor(config).dry_run(run_dir)

    def launch(self, run_dir: Path) -> int:
        """Run the preflight if enabled, then run to the end; return the exit code."""
        return self._supervisor(run_file.load(run_dir)).launch(run_dir)


def can_fork(config: dict[str, Any]) -> bool:
    """Whether the ranks are forked: with GPUs only on request, nsys and programs start anew."""
    fork = config["cluster"].get("fork", True)  # an old run has no such setting
    if fork != "always":
        fork = fork and not (hardware.count_gpus() or gpus_per_node(config["cluster"]))
    return sys.platform == "linux" and bool(fork) and not (is_script(config) or config.get("nsys"))
