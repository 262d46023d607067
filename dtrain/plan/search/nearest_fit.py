"""Find the nearest layout that fits: the changes that a user makes first, in order, and only then another strategy."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from dtrain.checks.validate import validate
from dtrain.plan.layout import layout_of
from dtrain.plan.predict import Prediction, predict_layout, task_of
from dtrain.plan.search.search import divisors, overrides_of, search
from dtrain.plan.sections import missing_package, strategy_section

MORE_NODES = (2, 4, 8, 16)  # factors; beyond that it is another project


def nearest(config: Mapping[str, Any]) -> tuple[list[str], Prediction] | None:
    """Return the overrides that make a configuration fit, and the resulting prediction.

    First a smaller micro-batch, then activation checkpointing, then both under fsdp; then any layout of these GPUs that
    fits (tensor, pipeline, offload, ...), and last more nodes.
    """
    task = task_of(config)
    if task is None:
        return None
    for typed, variant in changes(config):
        try:
            prediction = predict_layout(layout_of(variant), task, timed=False)
            if prediction.fits:
                validate(variant)  # e.g. a batch that does not divide by that many ranks
                return typed, prediction
        except ValueError:
            continue
    for times in (1, *(MORE_NODES if config["cluster"].get("gpus_per_node") else ())):
        nodes = config["cluster"]["nodes"] * times
        larger = {**config, "cluster": {**config["cluster"], "nodes": nodes}}
        for prediction in search(larger, time_unfit=False):
            if prediction.fits and not missing_package(prediction.layout.strategy):
                more = [f"cluster.nodes={nodes}"] if times > 1 else []
                return [*more, *overrides_of(prediction, config)], prediction
    return None


def changes(config: Mapping[str, Any]) -> Iterator[tuple[list[str], dict[str, Any]]]:
    """Yield overrides and the resulting configuration, the smallest change first."""
    others = [] if config["choices"]["strategy"] == "fsdp" else ["fsdp"]
    for strategy in ["", *others]:
        base = dict(config)
        if strategy:
            base |= {"strategy": strategy_section(strategy), "choices": {**config["choices"], "strategy": strategy}}
        try:
            layout = layout_of(base)
        except ValueError:  # the batch does not divide by that many data ranks
            continue
        size = layout.micro_batch_size
        for mode in modes(config["activation_checkpointing"], layout.compile != "none"):
            typed = [f"strategy={strategy}"] if strategy else []
            typed += [f"activation_checkpointing={mode}"] if mode != config["activation_checkpointing"] else []
            for micro in reversed(divisors(size * layout.micro_batches)):
                if micro > size or (micro == size and not typed) or not may_change(config, micro, size):
                    continue
                more = [f"train.micro_batch_size={micro}"] if micro < size else []
                train = {**base["train"], "micro_batch_size": micro}
                yield [*typed, *more], {**base, "activation_checkpointing": mode, "train": train}


def modes(current: str, compiled: bool) -> list[str]:
    """Return the current kind of checkpointing, and those that keep less, cheapest first.

    Compiled, `ops` costs 3 to 4% of the speed and `full` 17 to 19; eager, `ops` costs 11 to 13 (docs/performance.md).
    """
    less = {"none": ["ops", "full"] if compiled else ["full"], "ops": ["full"], "selective": ["full"], "full": []}
    return [current, *less[current]]


def may_change(config: Mapping[str, Any], micro: int, size: int) -> bool:
    """Batch norm statistics depend on the micro-batch size, so a resumed run keeps its own."""
    return micro == size or not (config["resume"] and "batch_norm" in config["model"])
