"""The ranks' environment: the fabric's profile and variables that every rank needs, each with its reason.

The profile is data in conf/cluster/*.yaml. A variable that the user has set is never overwritten, only shown. No torch
and no Hydra: the supervisor inside a job imports this.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from dtrain.checks.network import check as check
from dtrain.config.hardware import gpus_per_node, ranks_per_node
from dtrain.config.redaction import hide
from dtrain.util.format import as_dict


@dataclass(frozen=True)
class Export:
    """One variable, why it is set, and the user's own value, if it differs."""

    name: str
    value: str
    why: str
    theirs: str | None = None


def exports(config: Mapping[str, Any], environ: Mapping[str, str]) -> list[Export]:
    """List every variable to set, the profile's first; the profile takes precedence over the common ones."""
    env = as_dict(as_dict(config["cluster"].get("fabric")).get("env"))
    wanted = {name: (str(entry["value"]), str(entry["why"])) for name, entry in env.items()}
    for name, entry in common(config, environ).items():
        wanted.setdefault(name, entry)
    found = []
    for name, (value, why) in wanted.items():
        theirs = environ.get(name)
        found.append(Export(name, value, why, theirs if theirs != value else None))
    return found


def common(config: Mapping[str, Any], environ: Mapping[str, str]) -> dict[str, tuple[str, str]]:
    """Variables for any fabric. TORCH_NCCL_ASYNC_ERROR_HANDLING is not set: its default ends a hung collective."""
    wanted = {}
    ranks, cores = ranks_per_node(config["cluster"]), cores_per_node(config, environ)
    if cores:
        threads = str(max(1, cores // ranks))
        wanted["OMP_NUM_THREADS"] = (
            threads,
            f"{cores} cores for {ranks} ranks; torchrun would set 1, torch alone would use all",
        )
    if gpus_per_node(config["cluster"]):
        wanted["PYTORCH_ALLOC_CONF"] = (
            "expandable_segments:True",
            "the allocator's segments can grow, so that changing sizes fragment GPU memory less",
        )
    if (as_dict(config.get("strategy")).get("tp") or 1) > 1:
        wanted["CUDA_DEVICE_MAX_CONNECTIONS"] = (
            "1",
            "kernels start in the order of their launch, so that tensor-parallel collectives overlap with matmuls",
        )
    return wanted


def environment(config: Mapping[str, Any], environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variables to add: only those that the user has not set."""
    return {e.name: e.value for e in exports(config, environ) if e.name not in environ}


def differences(config: Mapping[str, Any], environ: Mapping[str, str]) -> list[str]:
    """Return one line for each variable where the user's value is used instead of the profile's."""
    return [
        f"{e.name}={quote(e.theirs)} (yours) instead of {quote(e.value)}: {e.why}"
        for e in exports(config, environ)
        if e.theirs is not None
    ]


def quote(value: str) -> str:
    """Quote for any shell: zsh would expand =eth0 at the start of a value to the path of a program."""
    value = hide(value)
    return value if re.fullmatch(r"[\w.,:/+-]+", value, re.ASCII) else "'" + value.replace("'", "'\"'\"'") + "'"


def cores_per_node(config: Mapping[str, Any], environ: Mapping[str, str]) -> int | None:
    """Cores for all ranks of a node, if known: from the submission, inside the job, or on this node."""
    cluster = config["cluster"]
    if cluster.get("cpus_per_task"):
        return int(cluster["cpus_per_task"]) * ranks_per_node(config["cluster"])
    if cluster.get("cpus"):  # of a pod, which sees all cores of its machine
        return int(cluster["cpus"])
    if cluster.get("launcher", "torchrun") == "torchrun":  # the ranks run on this machine
        return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    here = environ.get("SLURM_CPUS_ON_NODE", "")
    return int(here) if here.isdigit() else None
