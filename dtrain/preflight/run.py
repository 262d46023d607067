"""Preflight: is every node fit for the run, before the first step? Settings, entry points and the command.

quick.py looks at every node (an agent on each: node.py), full.py measures (ranks on each: probe.py).
"""

from __future__ import annotations

import contextlib
import os
import shlex
import shutil
import socket
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

from dtrain import file_handles
from dtrain import start as starting
from dtrain.comm.quick import Quick
from dtrain.comm.report import Check, Report
from dtrain.comm.starters import Starter as Starter
from dtrain.comm.starters import local_starter as local_starter
from dtrain.config import bad, build, ranks_per_node
from dtrain.contract import DONE, PREFLIGHT
from dtrain.words import short_path


class Preflight:
    def __init__(
        self,
        level: Literal["off", "quick", "full"] = "quick",
        exclude_bad: bool = False,
        timeout_s: float = 50,
        measure_s: float = 240,
        min_shm_gib: float = 1.0,
        max_skew_s: float = 1.0,
        tolerance: float = 0.7,
        outlier: float = 0.5,
        sizes_mib: list[int] | None = None,
    ) -> None:
        for name, value, least in (
            ("timeout_s", timeout_s, 2),
            ("measure_s", measure_s, 10),
            ("max_skew_s", max_skew_s, 0),
        ):
            if value < least:
                raise bad(f"preflight.{name}", value, f"must be at least {least} seconds", f"preflight.{name}={least}")
        for name, part in (("tolerance", tolerance), ("outlier", outlier)):
            if not 0 <= part <= 1:
                raise bad(f"preflight.{name}", part, "is a part of a figure, from 0 to 1", f"preflight.{name}=0.5")
        sizes = [1, 16, 256] if sizes_mib is None else sizes_mib
        if not sizes or min(sizes) < 1 or sorted(set(sizes)) != sizes:
            raise bad(
                "preflight.sizes_mib", sizes, "must be whole numbers going up", "'preflight.sizes_mib=[1,16,256]'"
            )
        self.level, self.exclude_bad, self.timeout_s, self.measure_s = level, exclude_bad, timeout_s, measure_s
        self.min_shm_gib, self.max_skew_s = min_shm_gib, max_skew_s
        self.tolerance, self.outlier, self.sizes_mib = tolerance, outlier, sizes

    def run(
        self,
        config: dict[str, Any],
        run_dir: Path,
        nodes: list[str],
        start: Starter,
        say: Callable[[str], None],
        stop: Callable[[], bool] = lambda: False,
    ) -> Report:
        """Check the nodes, say what was found, and leave it in preflight.json. `stop` is asked again and again."""
        say(f"preflight {self.level} on {', '.join(nodes)}")
        report = self.check(config, run_dir, nodes, start, stop)
        for line in report.lines():
            say(line)
        return report

    def check(
        self,
        config: dict[str, Any],
        run_dir: Path,
        nodes: list[str],
        start: Starter,
        stop: Callable[[], bool] = lambda: False,
    ) -> Report:
        began = time.monotonic()
        file_handles.raise_limit()  # every agent, and every measuring rank, keeps a connection to this process
        report = Report(self.level, list(nodes))
        folder = run_dir / "preflight"
        with contextlib.suppress(OSError):  # on a full disk: the agents say so over the network
            folder.mkdir(parents=True, exist_ok=True)
        quick = Quick(self, config, run_dir, nodes, start, stop)
        quick.fill(report)
        go_on = report.ok or (self.exclude_bad and report.good)
        if self.level == "full" and go_on and not report.stopped:
            from dtrain.comm.full import measure

            measure(self, config, run_dir, report, quick.addresses, start, stop)
        elif self.level == "full" and not report.stopped:
            why = "the quick checks must pass first, or preflight.exclude_bad=true"
            report.checks += [Check(node, "measurements", "skipped", why) for node in nodes]
        report.seconds = round(time.monotonic() - began, 2)
        report.write(run_dir / "preflight.json")
        return report


def main(argv: list[str]) -> int:
    """`dtrain preflight …`: the checks alone, on this machine or on the nodes of a SLURM job. Exit code 0 or 4."""
    from dtrain.compose import compose

    words = [word.partition("=")[0] for word in argv]
    config = compose(argv if {"preflight", "preflight.level"} & set(words) else [*argv, "preflight=quick"])
    settings = {k: v for k, v in config["preflight"].items() if k != "_target_"}
    check = Preflight(**settings)
    if check.level == "off":
        raise bad("preflight", "off", "then there is nothing to do", "preflight=quick or preflight=full")
    nodes, start = nodes_and_starter(config, argv)
    run_dir = Path(config["run_dir"]).absolute()
    asked = "run_dir" in words
    if not asked:  # the disk where runs go is looked at, and what the checks leave there goes with them
        parent = run_dir.parents[1]
        parent.mkdir(parents=True, exist_ok=True)
        run_dir = Path(tempfile.mkdtemp(prefix=".preflight-", dir=parent))
    report = check.check(config, run_dir, nodes, start)
    report.print()
    if asked or not report.ok:
        print(f"details in {short_path(run_dir)}")
    else:
        shutil.rmtree(run_dir, ignore_errors=True)
    return DONE if report.ok else PREFLIGHT


def nodes_and_starter(config: dict[str, Any], argv: list[str]) -> tuple[list[str], Starter]:
    """Where to look: this machine, or through srun on the nodes of the job we are in."""
    cluster = config["cluster"]
    if cluster.get("launcher", "torchrun") == "torchrun":
        return [socket.gethostname()], local_starter
    from dtrain.launchers import batch

    listed = os.environ.get("SLURM_JOB_NODELIST")
    if not listed:
        if shutil.which("salloc") is None:
            fix = "log in where the cluster's commands are, or preflight=… on the job itself"
            raise bad("cluster", config["choices"].get("cluster"), "there is no salloc on this machine", fix)
        request = build(cluster | {"processes": ranks_per_node(cluster)}).salloc()
        command = [*request, *starting.command("dtrain.cli"), "preflight", *argv]
        print(f"asking SLURM for the nodes: {shlex.join(command)}", flush=True)
        os.execvp(command[0], command)  # it comes back here, inside a job; the exit code is the command's
    nodes = batch.scontrol("scontrol", "show", "hostnames", listed).split()
    if not nodes:
        raise bad(
            "cluster", config["choices"].get("cluster"), "scontrol does not say which nodes the job has", "squeue --me"
        )
    return nodes, batch.starter(config)
