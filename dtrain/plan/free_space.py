"""Refuse a start where the run folder's disk, or /dev/shm, is full: the ranks would find out minutes or hours later.

On the nodes of a cluster, preflight checks both. Data that are read in a process of their own, whatever
train.loader_workers is, are known only to the ranks: data/prefetch.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dtrain.config.files import is_script
from dtrain.config.hardware import gpus_per_node
from dtrain.errors import bad
from dtrain.plan.peer_memory import checkpoint_bytes
from dtrain.util import disk_space

RECORDS = 2**20  # bytes of config.yaml, metrics.jsonl and the logs of a short run


def check(config: Mapping[str, Any]) -> None:
    if config["dry_run"] or config["cluster"].get("run_root") is not None:  # a volume that is not mounted here
        return
    run_dir = Path(config["run_dir"])
    if text := disk_space.shortage(run_dir, RECORDS):
        raise full(run_dir, text)
    check_shared_memory(config)
    if is_script(config) or config["force"] or config["resume"] or not config["checkpoint"]["save"]:
        return
    needs, free = checkpoint_bytes(config), disk_space.free_bytes(run_dir)
    if needs is not None and free is not None and needs > free:
        size, room = disk_space.size_text(needs), disk_space.size_text(free)
        rule = f"one checkpoint has {size}, and the disk of {run_dir.parent} has {room} free"
        fix = "make room there, run_dir=… on another disk, checkpoint=none to save nothing, or force=true"
        raise bad("run_dir", run_dir, rule, fix)


def check_shared_memory(config: Mapping[str, Any]) -> None:
    cluster = config["cluster"]
    if cluster["_target_"] != "dtrain.launch.local.Local":
        return
    workers = 0 if is_script(config) else config["train"]["loader_workers"]
    several = bool(gpus_per_node(cluster)) and cluster["processes"] not in (None, 1)  # NCCL
    if (workers or several) and (text := disk_space.shortage(disk_space.SHARED_MEMORY, disk_space.LEAST_SHARED)):
        rule, _, fix = text.partition(". Fix: ")
        name, value = ("train.loader_workers", workers) if workers else ("cluster.processes", cluster["processes"])
        raise bad(name, value, rule, fix)


def full(run_dir: Path, text: str) -> ValueError:
    rule, _, fix = text.partition(". Fix: ")
    return bad("run_dir", run_dir, rule, f"{fix}, or run_dir=… on another disk")
