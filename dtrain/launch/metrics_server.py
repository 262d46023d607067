"""The process that serves a run's metrics for Prometheus (cluster.metrics_port), beside the supervisor.

It is a process of its own, so that nothing it does can slow or end the supervisor. It reads the run folder only.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

from dtrain import start
from dtrain.util import ports
from dtrain.util.format import clean

LOG = "logs/metrics-server.log"


def check(cluster: dict[str, Any]) -> None:
    """Refuse a port of this machine that is in use, before anything starts."""
    port, host = cluster.get("metrics_port"), cluster.get("metrics_host", "127.0.0.1")
    if port is not None:
        ports.check("cluster.metrics_port", port, host, "cluster.metrics_port=null")


class MetricsServer:
    """The running process, if the run asks for one. `poll` reports once that it has ended too early."""

    process: subprocess.Popen[bytes] | None = None

    def __init__(self, run_dir: Path, cluster: dict[str, Any]) -> None:
        self.log = run_dir / LOG
        port, host = cluster.get("metrics_port"), cluster.get("metrics_host", "127.0.0.1")
        if port is None:
            return
        command = [*start.command("dtrain.report.prometheus"), str(run_dir), str(host), str(port), str(os.getpid())]
        try:
            self.log.parent.mkdir(exist_ok=True)
            with open(self.log, "wb") as log:
                self.process = subprocess.Popen(
                    command,
                    env=os.environ | start.environment(),
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    start_new_session=True,  # Ctrl-C must reach only the supervisor
                )
        except OSError:
            pass  # a full disk, or too many processes: training matters more

    def poll(self, say: Callable[[str], None]) -> None:
        if self.process is None or self.process.poll() is None:
            return
        self.process = None
        try:
            last = self.log.read_bytes()[-1000:].decode(errors="replace").strip().splitlines()[-1:]
        except OSError:
            last = []
        say(f"metrics are not served (cluster.metrics_port): {clean(' '.join(last)) or 'the server ended'}")

    def end(self) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.wait()
