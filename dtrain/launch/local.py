"""Launch on this machine: torchrun starts the ranks; those of an elastic run are forked, because they change often."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

from dtrain.checks import profile as profiling
from dtrain.config import elastic, run_file
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
    ) -> None:
        if nodes != 1:
            fix = "cluster.nodes=1; for more: cluster=slurm, also without SLURM (cluster.launcher=torchrun)"
            raise bad("cluster.nodes", nodes, "cluster=local is one machine", fix)
        self.max_restarts, self.grace_s = max_restarts, grace_s

    def _supervisor(self, config: dict[str, Any]) -> Torchrun:
        if elastic.range_of(config):
            return Forked(config, Members(config), self.max_restarts, self.grace_s)
        # the address instead of the host name: a name that does not resolve stalls silently for ten minutes
        place = ["--standalone", "--local-addr=127.0.0.1"]
        return Torchrun(config, place, self.max_restarts, self.grace_s)

    def check(self, config: dict[str, Any]) -> None:
        file_handles.check("cluster.processes", *[config["cluster"]["processes"]] * 2)
        nsys.check(config)
        metrics_server.check(config["cluster"])
        profiling.check_machine(config)

    def dry_run(self, run_dir: Path, config: dict[str, Any]) -> None:
        self._supervisor(config).dry_run(run_dir)

    def launch(self, run_dir: Path) -> int:
        """Run the preflight if enabled, then run to the end; return the exit code."""
        return self._supervisor(run_file.load(run_dir)).launch(run_dir)
