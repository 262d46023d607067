"""Rules of hooks, from their source: nothing of the user's is imported before the ranks start."""

from __future__ import annotations

import ast
import math
from typing import Any

from dtrain.checks.checkpoint import check_known
from dtrain.config.files import HOOKS, option_of
from dtrain.config.hook_methods import METHODS, Arity, check_methods, meant
from dtrain.config.source import class_source, place
from dtrain.config.source_files import parse, spec_of
from dtrain.errors import bad
from dtrain.models.losses import OWN
from dtrain.runs.best import EARLY_STOP
from dtrain.runs.metrics import larger_is_better


def check(config: dict[str, Any]) -> None:
    for name, section in config[HOOKS].items():
        target = section["_target_"]
        key = f"{HOOKS}.{name}"
        if isinstance(every := section.get("every"), int) and every < 1:
            raise bad(f"{key}.every", every, "must be at least 1", f"{key}.every=1")
        if target == EARLY_STOP:
            check_early_stop(config, key, {**(option_of(HOOKS, target) or {}), **section})  # by its class: no defaults
        methods = methods_of(target)
        if methods is not None:
            check_outputs(config, target, methods)


def methods_of(target: str) -> set[str] | None:
    """Check the class; return the names of its methods. None: not decidable without importing its module."""
    source = class_source(target)
    if source is None:
        return None
    nodes = {node.name: node for node in source.body if isinstance(node, ast.FunctionDef)}
    found = {name: arity(node) for name, node in nodes.items()}
    # after_step = … in the class, self.after_step = … in a method; not run.end = … of another object
    assigned = {node.attr for node in ast.walk(source) if isinstance(node, ast.Attribute)
                and isinstance(node.ctx, ast.Store) and ast.unparse(node.value) == "self"}  # fmt: skip
    for statement in source.body:
        if isinstance(statement, (ast.Assign, ast.AnnAssign)):
            assigned |= {node.id for node in ast.walk(statement) if isinstance(node, ast.Name)}
    found |= {name: None for name in assigned & METHODS.keys() - found.keys()}
    others = [
        name for name, node in nodes.items() if name.startswith("on_") and meant(name) and not node.decorator_list
    ]
    others = [] if source.bases or is_dynamic(source) else [name for name in others if name not in called_in(target)]
    if others and found.keys() & METHODS.keys() and meant(others[0]) not in found:
        rule = f"{place(target, nodes[others[0]])}: {source.name}.{others[0]} is not a method that dtrain calls"
        fix = f"did you mean {meant(others[0])}? If it is for {source.name} itself: _{others[0]}"
        raise bad(HOOKS, target, rule, fix)
    check_methods(target, found, not source.bases, lambda name: f"{place(target, nodes.get(name, source))}: ")
    return set(nodes)


def is_dynamic(source: ast.ClassDef) -> bool:
    """Does a class look for its methods by name, as getattr(self, f"on_{event}") does?"""
    return any(isinstance(node, ast.Name) and node.id == "getattr" for node in ast.walk(source))


def called_in(target: str) -> set[str]:
    """Return the names of methods that the file of a class uses."""
    spec = spec_of(target.rpartition(".")[0])
    tree = parse(spec.origin, HOOKS, target) if spec and spec.origin else ast.Module([], [])
    return {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)}


def arity(node: ast.FunctionDef) -> Arity | None:
    if node.decorator_list:  # a static method, or changed by a decorator
        return None
    arguments = node.args
    if any(default is None for default in arguments.kw_defaults):  # required, and never given
        return math.inf, 0
    most = len(arguments.posonlyargs) + len(arguments.args) - 1
    return most - len(arguments.defaults), math.inf if arguments.vararg else most


def check_outputs(config: dict[str, Any], target: str, methods: set[str]) -> None:
    """Reject metrics of outputs that nothing has."""
    name = target.rpartition(".")[2]
    if "train_metrics" in methods and config["loss"]["_target_"] == OWN:
        rule = f"{name}.train_metrics needs the outputs of a training step, and with loss=own only the model has them"
        fix = "rename it to eval_metrics, or a model that returns outputs, and a loss: loss=cross_entropy (now own)"
        raise bad(HOOKS, target, rule, fix)
    if "train_metrics" in methods and config["strategy"].get("mode") in ("async", "bounded"):
        rule = f"a rank may have no batch of its own in a step, and {name}.train_metrics is a mean over the ranks"
        raise bad("strategy.mode", config["strategy"]["mode"], rule, "strategy.mode=sync, or rename it to eval_metrics")
    if "eval_metrics" in methods and not config["train"]["eval_batches"]:
        rule = f"{name}.eval_metrics needs evaluations, and the run makes none (train.eval_batches=0)"
        raise bad(HOOKS, target, rule, "train.eval_batches=8")
    if methods & {"eval_metrics"} and config["strategy"].get("loss_parallel"):
        rule = f"shards the outputs, but {name}.eval_metrics needs whole outputs"
        raise bad("strategy.loss_parallel", "true", rule, "strategy.loss_parallel=false")


def check_early_stop(config: dict[str, Any], key: str, section: dict[str, Any]) -> None:
    if section["patience"] < 1:
        raise bad(f"{key}.patience", section["patience"], "must be at least 1", f"{key}.patience=1")
    if not section["min_delta"] >= 0:
        raise bad(f"{key}.min_delta", section["min_delta"], "must be at least 0", f"{key}.min_delta=0.0")
    metric, is_max = section["metric"], larger_is_better(section["metric"])
    if metric.startswith("val_") and not config["train"]["eval_batches"]:
        rule = "the run makes no evaluations (train.eval_batches=0)"
        raise bad(f"{key}.metric", metric, rule, "train.eval_batches=8")
    check_known(f"{key}.metric", metric, config)
    if is_max is not None and (section["mode"] == "max") != is_max:
        rule = f"{metric} is better if it is {'larger' if is_max else 'smaller'}"
        raise bad(f"{key}.mode", section["mode"], rule, f"{key}.mode={'max' if is_max else 'min'}")
