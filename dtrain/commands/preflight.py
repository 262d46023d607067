"""`dtrain preflight`: check the nodes before a run, or without one."""

from __future__ import annotations

import os
import shlex
import shutil
import socket
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from dtrain import start as starting
from dtrain.config.build import build
from dtrain.config.hardware import ranks_per_node
from dtrain.errors import bad
from dtrain.preflight.run import Preflight
from dtrain.preflight.start import Starter as Starter
from dtrain.preflight.start import local_starter as local_starter
from dtrain.runs.protocol import DONE, PREFLIGHT
from dtrain.util.format import short_path

USAGE = """usage: dtrain preflight [preflight=quick|full] [cluster=NAME] [setting=value ...]

Check this machine, or the nodes of a SLURM job, without a run.

  preflight=quick    GPUs, versions, network, disk, memory and clocks of each node: a few seconds (the default)
  preflight=full     also measure GPUs, memory and collectives, and name slow nodes and links
  run_dir=FOLDER     keep the report there

Exit codes: 0 all nodes passed, 2 bad configuration, 4 a node did not pass."""


def main(argv: list[str]) -> int:
    """`dtrain preflight …`: run only the checks, on this machine or on the nodes of a SLURM job. Exit code 0 or 4."""
    if {"-h", "--help"} & set(argv):
        print(USAGE)
        return DONE
    from dtrain.launch.compose import compose

    keys = [word.partition("=")[0] for word in argv]
    config = compose(argv if {"preflight", "preflight.level"} & set(keys) else [*argv, "preflight=quick"])
    settings = {k: v for k, v in config["preflight"].items() if k != "_target_"}
    check = Preflight(**settings)
    if check.level == "off":
        raise bad("preflight", "off", "leaves nothing to check", "preflight=quick or preflight=full")
    nodes, start = nodes_and_starter(config, argv)
    run_dir = Path(config["run_dir"]).absolute()
    asked = "run_dir" in keys
    if not asked:  # check the disk where runs go; the checks' files there are removed afterwards
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


def nodes_and_starter(
    config: dict[str, Any], argv: list[str], command: Sequence[str] = ("preflight",), quiet: bool = False
) -> tuple[list[str], Starter]:
    """Return the nodes to check and how to reach them: this machine, or srun on the nodes of the current job.

    `command`: the words of ours that are run again inside a job, with `argv`. quiet: stdout is for the result alone.
    """
    cluster = config["cluster"]
    if cluster.get("launcher", "torchrun") == "torchrun":
        return [socket.gethostname()], local_starter
    from dtrain.launch import slurm_job, srun

    listed = os.environ.get("SLURM_JOB_NODELIST")
    if not listed:
        if shutil.which("salloc") is None:
            fix = "log in to a machine with SLURM's commands, or use preflight=… in the job itself"
            raise bad("cluster", config["choices"].get("cluster"), "there is no salloc on this machine", fix)
        request = build(cluster | {"processes": ranks_per_node(cluster)}).salloc()
        line = [*request, *starting.command("dtrain.cli"), *command, *argv]
        print(f"asking SLURM for the nodes: {shlex.join(line)}", flush=True, file=sys.stderr if quiet else sys.stdout)
        os.execvp(line[0], line)  # salloc runs this command again inside a job; its exit code is the command's
    nodes = srun.scontrol("scontrol", "show", "hostnames", listed).split()
    if not nodes:
        raise bad(
            "cluster", config["choices"].get("cluster"), "scontrol does not say which nodes the job has", "squeue --me"
        )
    return nodes, slurm_job.starter(config)
