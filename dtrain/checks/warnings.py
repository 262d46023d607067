"""Warn of settings that are allowed, and are probably a mistake: one line each, with the numbers and a fix."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

from dtrain.checks.validate import validate
from dtrain.config.files import is_script, section
from dtrain.config.hardware import count_gpus

CROWDED = 8  # ranks on a core; so many still start in seconds, e.g. to try tp=4 pp=2 on a small machine


def warnings(config: dict[str, Any]) -> Iterator[str]:
    """Yield the warnings of a checked configuration with a fixed number of ranks."""
    if not is_script(config):
        yield from of_warmup(config)
    yield from of_crowding(config)


def of_warmup(config: dict[str, Any]) -> Iterator[str]:
    """A warm-up that somebody chose, or a recipe: a first try of a few steps keeps the default without a word."""
    warmup, steps = config["schedule"].get("warmup_steps"), config["train"]["steps"]
    chosen = str(config["choices"].get("schedule"))
    if not isinstance(warmup, int) or steps is None or warmup <= steps or not is_own_value(chosen, warmup):
        return
    yield (
        f"schedule.warmup_steps={warmup} is longer than the run, train.steps={steps}: the learning rate only reaches "
        f"{100 * steps / (warmup + 1):.2g}% of its peak; fix: schedule.warmup_steps={steps // 10}"
    )


def is_own_value(option: str, warmup: int) -> bool:
    try:
        return bool(section("schedule", option).get("warmup_steps") != warmup)
    except OSError:  # an option of the user's own
        return True


def of_crowding(config: dict[str, Any]) -> Iterator[str]:
    """Processes on this machine's cores; with GPUs, checks/strategy.py looks at how many share one."""
    cluster = config["cluster"]
    if cluster["_target_"] != "dtrain.launch.local.Local" or count_gpus():
        return
    ranks, cores = cluster["processes"], len(os.sched_getaffinity(0))
    if ranks <= CROWDED * cores:
        return
    fitting = max(2, cores)
    numbers = [*range(fitting, 0, -1), *range(fitting + 1, CROWDED * cores + 1)]  # the best ones first
    fewer = (n for n in numbers if is_allowed(config, n))
    fix = next(
        (f"cluster.processes={n}" for n in fewer), "smaller degrees in strategy, or more machines: cluster=slurm"
    )
    share = f"{ranks / cores:.0f} share a core, and each takes its own memory"
    yield f"cluster.processes={ranks} on a machine with {cores} cores: {share}; fix: {fix}"


def is_allowed(config: dict[str, Any], processes: int) -> bool:
    try:
        validate(config | {"cluster": config["cluster"] | {"processes": processes}})
    except ValueError:
        return False
    return True
