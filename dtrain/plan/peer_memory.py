"""Reject checkpoint.peer=true where this machine's /dev/shm has no room for the copies.

On other machines, and for a user's own model or optimizer, the ranks check it at the first copy.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from dtrain.errors import bad
from dtrain.plan import compression
from dtrain.plan.layout import layout_of
from dtrain.plan.memory.states import held_whole, moment_bytes
from dtrain.plan.model_shape import shape_of
from dtrain.plan.parameters import trained_parameters
from dtrain.plan.predict import GIB
from dtrain.plan.run_prediction import foreign
from dtrain.util.disk_space import SHARED_MEMORY, shared_memory
from dtrain.util.format import gib


def check_copies(config: Mapping[str, Any]) -> None:
    if not config.get("checkpoint", {}).get("peer") or config["force"] or config.get("dry_run"):
        return
    if config["cluster"]["_target_"] != "dtrain.launch.local.Local":
        return
    off = "checkpoint.peer=false"
    try:
        usage = os.statvfs(SHARED_MEMORY)
    except OSError:
        what, _, fix = shared_memory().partition(". Fix: ")
        raise bad("checkpoint.peer", True, what, f"{fix}, or {off}") from None
    needs, has = checkpoint_bytes(config), usage.f_bavail * usage.f_frsize
    if needs is not None and 2 * needs > has:
        rule = f"the last copy and the next one need {gib(2 * needs / GIB)}"
        rule += f", and {SHARED_MEMORY} has {gib(has / GIB)} free"
        fix = f"a larger one (docker run --shm-size=…, or mount -o remount,size=… {SHARED_MEMORY}), or {off}"
        raise bad("checkpoint.peer", True, rule, fix)


def checkpoint_bytes(config: Mapping[str, Any]) -> int | None:
    """Return the bytes of a checkpoint's tensors; None if the user's own code decides. LoRA saves its adapters only."""
    shape = shape_of(config)
    if shape is None or foreign(config):
        return None
    size = 2 if config["precision"].get("parameters") == "bfloat16" else 4
    layout, weights = layout_of(config), trained_parameters(shape)
    moments = layout.moments + (layout.optimizer == "muon")  # at most: of matrices one less
    chosen = 0.0
    if layout.state:
        few = held_whole(shape, replace(layout, tp=1, loss_parallel=False)).compressed
        moments, chosen = moments - 2, 2 * (4 * (weights - few) + moment_bytes(layout) * few)
    outer = 2 * 4 * weights if layout.strategy == "diloco" and layout.token_ranks > 1 else 0
    errors = layout.token_ranks * compression.state_bytes(shape, layout) / 2  # of all ranks, without this step
    return int(weights * size * (1 + moments) + chosen + outer + errors)
