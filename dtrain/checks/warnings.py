"""Warn of settings that are allowed, and are probably a mistake: one line each, with the numbers and a fix."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from typing import Any

from dtrain.checks.validate import validate
from dtrain.config import run_length
from dtrain.config.files import is_script
from dtrain.config.hardware import count_cores, count_gpus
from dtrain.config.source import inherited, place, source_of

TRUE = ("target", "targets", "label", "labels", "y", "y_true", "true", "truth", "gt", "ground_truth")
PREDICTED = (
    "output", "outputs", "out", "pred", "preds", "y_pred", "prediction", "predictions", "predicted", "logits", "scores",
    "y_hat", "yhat",
)  # fmt: skip
CROWDED = 8  # ranks on a core; so many still start in seconds, e.g. to try tp=4 pp=2 on a small machine


def warnings(config: dict[str, Any]) -> Iterator[str]:
    """Yield the warnings of a checked configuration with a fixed number of ranks."""
    if not is_script(config) and (steps := config["train"]["steps"]):  # the ranks know those of train.epochs
        yield from run_length.of_warmup(config, steps)
    yield from of_crowding(config)
    yield from of_loss(config)


def of_loss(config: dict[str, Any]) -> Iterator[str]:
    """A loss whose arguments are named the other way round: one that raises is refused by the ranks."""
    if is_script(config) or config["loss"]["_target_"].startswith(("dtrain.", "torch.")):
        return
    target = config["loss"]["_target_"]
    function = source_of(target)
    if isinstance(function, ast.ClassDef):
        function = method if isinstance(method := inherited(target, "forward"), ast.FunctionDef) else None
    names = [a.arg for a in function.args.args if a.arg != "self"] if isinstance(function, ast.FunctionDef) else []
    if function is not None and len(names) > 1 and names[0].lower() in TRUE and names[1].lower() in PREDICTED:
        where = f"{place(target, function)}: {function.name}({', '.join(names)})"
        fix = f"fix, if they differ: def {function.name}({names[1]}, {names[0]})"
        yield f"loss={target}: {where} gets the outputs first, and then the targets; {fix}"


def of_crowding(config: dict[str, Any]) -> Iterator[str]:
    """Processes on this machine's cores; with GPUs, checks/strategy.py looks at how many share one."""
    cluster = config["cluster"]
    if cluster["_target_"] != "dtrain.launch.local.Local" or count_gpus():
        return
    ranks, cores = cluster["processes"], count_cores()
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
