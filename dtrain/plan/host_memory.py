"""Reject a CPU launch of a model that this machine's memory cannot hold: the kernel would kill it (SIGKILL).

Weights, gradients and optimizer state are exact. Activations are an estimate: a run is rejected if they exceed the
memory even after a division by CERTAIN_ON_CPU, and below that there is a warning.
"""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from dtrain.checks.validate import validate
from dtrain.config.files import is_script, options_of
from dtrain.config.hardware import gpus_per_node, ranks_per_node, world_size
from dtrain.errors import bad
from dtrain.plan import compression
from dtrain.plan.layout import Layout, layout_of
from dtrain.plan.ledger import total
from dtrain.plan.memory.peak import memory
from dtrain.plan.memory.pipeline import rank_stages
from dtrain.plan.memory.states import (
    HeldParameters,
    gradient_bytes,
    held_by,
    held_convolutions,
    optimizer_bytes,
    outer_bytes,
    weight_bytes,
)
from dtrain.plan.model_shape import Transformer, shape_of
from dtrain.plan.parameters import held_parameters
from dtrain.plan.predict import GIB, HOST_SHARE
from dtrain.plan.run_prediction import FAULT, NO_GPU, asked_for, foreign, is_for_elsewhere, left_out, strict
from dtrain.plan.sections import model_section, strategy_section
from dtrain.util.format import gib
from dtrain.util.host_memory import described, total_bytes

# Estimated activations may be too large by this factor: of ten runs (benchmarks/results/host-memory-cpu.json), those of
# 1 GiB or more were 0.90 to 1.0 of what was measured. BERT with dropout was 0.49: a CPU keeps its attention's weights.
CERTAIN_ON_CPU = 1.25
PROCESS = 0.4 * GIB  # of a rank, for Python and torch
OTHER_GPUS = (Path("/dev/dxg"), Path("/dev/kfd"))  # WSL's and AMD's: count_gpus does not see them, but torch may

log = logging.getLogger("dtrain")


def check_host(config: Mapping[str, Any]) -> None:
    """Reject a run that exceeds this machine's memory; warn if it may, and if only a preview was asked for."""
    try:
        found = shortage(config)
    except Exception as fault:
        if strict():
            raise
        rest = "so whether this machine's memory can hold the model is not known"
        log.warning("%s (%s: %s), %s", FAULT, type(fault).__name__, fault, rest)
        return
    if found is None:
        return
    error, is_certain = found
    if is_certain and not config.get("dry_run"):
        raise error
    log.warning("%s%s", "a launch here would be refused: " if is_certain else "", error)


def shortage(config: Mapping[str, Any]) -> tuple[ValueError, bool] | None:
    """Return the error and whether it is certain; None: it fits, its code is not ours, or it does not run here."""
    if config["force"] or not on_this_cpu(config["cluster"]) or is_for_elsewhere(config):
        return None
    states, has, ranks = states_of(config), machine_bytes(), ranks_per_node(config["cluster"])
    if states is None:
        return None
    needs = states if states > has else cpu_bytes(config)
    if needs <= has:
        return None
    what = "weights, gradients and optimizer state alone need" if states > has else "training needs"
    rule = f"{what} {of_ranks(needs, ranks)}"
    is_certain = states + (needs - states) / CERTAIN_ON_CPU > has
    rule += f", {described(has)} {gib(has / GIB)}, {NO_GPU}{'' if is_certain else ': the ranks may be killed'}"
    fix = f"{leaner(config, has)}; or force=true, if swap is enough"
    return bad("model", config["choices"].get("model"), rule, fix), is_certain


def of_ranks(needs: float, ranks: int) -> str:
    """Describe the memory that all ranks need together."""
    each = f" ({ranks} ranks × {gib(needs / ranks / GIB)})" if ranks > 1 else ""
    return f"{gib(needs / GIB)} of memory{each}"


def cpu_bytes(config: Mapping[str, Any]) -> float:
    """The memory of all ranks on this machine's CPUs, activations included; what is offloaded stays in it."""
    shape, states = shape_of(config), states_of(config)
    assert shape is not None and states is not None
    return max(states, world_size(config) * (total(memory(shape, layout_of(config))) + PROCESS))


def on_this_cpu(cluster: Mapping[str, Any]) -> bool:
    """Do the ranks run on this machine, without a GPU?"""
    if cluster["_target_"] != "dtrain.launch.local.Local" or cluster["nodes"] != 1 or gpus_per_node(cluster):
        return False
    return os.environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1") or not any(path.exists() for path in OTHER_GPUS)


def machine_bytes() -> int:
    return total_bytes()


def states_of(config: Mapping[str, Any]) -> float | None:
    """Bytes of weights, gradients and optimizer state over all ranks; None: a user's own code is involved."""
    shape = None if is_script(config) else shape_of(config)
    if shape is None or foreign(config):
        return None
    layout = layout_of(config)
    if isinstance(shape, Transformer):
        held = [held_by(shape, layout, rank_stages(shape, layout, rank)[0]) for rank in range(layout.pp)]
    else:
        held = [held_convolutions(shape, layout)]
    errors = compression.state_bytes(shape, layout)
    return layout.token_ranks * layout.tp * (errors + sum(rank_bytes(one, layout) for one in held))


def rank_bytes(held: HeldParameters, layout: Layout) -> float:
    """State bytes of one rank, wherever stored between steps, except on disk."""
    held = replace(held, largest=0)  # fairscale distributes whole weights: uneven shares, same sum
    weights = 0.0 if layout.offload_params == "nvme" else weight_bytes(held, layout)
    if layout.offload == "nvme":
        return weights
    outer = outer_bytes(held, layout)
    return weights + outer + gradient_bytes(held, layout) + optimizer_bytes(held, layout)


def leaner(config: Mapping[str, Any], has: float) -> str:
    """Return the smallest change that leaves enough room, as overrides."""
    try:
        if found := fitting(config, has, keep_batch="batch_norm" in config["model"]):
            overrides, needs = found
            return f"{' '.join(overrides)}{left_out(config, overrides)} ({gib(needs / GIB)})"
    except Exception as fault:  # the rejection is right even without a suggestion
        if strict():
            raise
        log.warning("%s (%s: %s), so no layout that fits is named", FAULT, type(fault).__name__, fault)
    return "a machine with GPUs or more memory, or a smaller model"


def fitting(config: Mapping[str, Any], has: float, keep_batch: bool) -> tuple[list[str], float] | None:
    """Return the smallest change with which a run fits, and its bytes. keep_batch: do not change the micro-batch."""
    for overrides, variant in lean_changes(config):
        for size in [None] if keep_batch else [None, 8, 4, 2, 1]:
            words = overrides if size is None else [*overrides, f"train.micro_batch_size={size}"]
            new = variant if size is None else {**variant, "train": {**variant["train"], "micro_batch_size": size}}
            with contextlib.suppress(ValueError):  # e.g. a batch that does not divide by that many ranks
                if (needs := cpu_bytes(new)) <= HOST_SHARE * has:
                    validate(new)
                    return words, needs
    return None


def lean_changes(config: Mapping[str, Any]) -> Iterator[tuple[list[str], dict[str, Any]]]:
    """Yield overrides and the resulting configuration: shards instead of replicas, fewer replicas, smaller models."""
    fewer, is_cut = range(ranks_per_node(config["cluster"]) - 1, 0, -1), config["choices"]["strategy"] == "fsdp"
    cut = {"strategy": strategy_section("fsdp"), "choices": {**config["choices"], "strategy": "fsdp"}}
    for name, model in [(None, config["model"]), *smaller_models(config)]:
        typed = [f"model={name}"] if name else []
        base = with_model(config, model)
        yield typed, base
        if not is_cut:
            yield [*typed, "strategy=fsdp"], base | cut
        for count in fewer:
            yield [*typed, f"cluster.processes={count}"], base | {"cluster": {**config["cluster"], "processes": count}}


def with_model(config: Mapping[str, Any], model: dict[str, Any]) -> dict[str, Any]:
    """Replace the model; data sizes that follow it (seq_len: ${model.seq_len}) change too, unless given explicitly."""
    data = dict(config["data"])
    follow = [key for key in data if key in model and data[key] == config["model"].get(key)]
    sizes = {key: model[key] for key in follow if not asked_for(config, f"data.{key}")}
    return {**config, "model": model, "data": data | sizes}


def smaller_models(config: Mapping[str, Any]) -> list[tuple[str, dict[str, Any]]]:
    """List models of conf/model for the same task with fewer parameters, largest first; none if sizes were typed."""
    now, found = shape_of(config), []
    for name in [] if asked_for(config, "model.") else options_of("model"):
        model = model_section(name)
        alike = all(model.get(key) == config["model"].get(key) for key in ("_target_", "task"))
        shape = shape_of({**config, "model": model}) if alike else None
        if now and shape and held_parameters(shape) < held_parameters(now):
            found.append((held_parameters(shape), name, model))
    return [(name, model) for _, name, model in sorted(found, reverse=True)]
