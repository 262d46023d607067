"""`strategy=auto`: the fastest layout that fits, put in its place before anything reads the configuration."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf, open_dict, read_write

from dtrain.arguments import AUTO
from dtrain.config import bad, flatten, gpus_per_node, world_size
from dtrain.explain import options_of
from dtrain.plan.fit import installed
from dtrain.plan.layout import layout_of
from dtrain.plan.ledger import total
from dtrain.plan.memory import memory
from dtrain.plan.predict import GIB, Prediction, why_not
from dtrain.plan.search import search, words
from dtrain.plan.settings import strategy_section
from dtrain.plan.shape import shape_of
from dtrain.plan.trust import with_detected
from dtrain.schema import check_keys_and_types
from dtrain.validate import check_ranges
from dtrain.words import gib, step_time


def settle(cfg: DictConfig, config: Mapping[str, Any]) -> None:
    """Choose, and change cfg and Hydra's record of it as if the words of the choice had been typed.

    config: cfg as plain values, as far as they can be known before there is a strategy.
    """
    hydra = HydraConfig.get()
    overrides = [str(word) for word in hydra.overrides.task]
    typed = {word.partition("=")[0].lstrip("+~") for word in overrides} - {"strategy"}
    if config["resume"] and "batch_norm" in config["model"]:
        typed.add("train.micro_batch_size")  # its statistics are those of a micro-batch
    chosen, why = choose(config, typed)
    kept = [word for word in overrides if not word.lstrip("+").startswith(("strategy=", "strategy."))]
    recompose(cfg, [*kept, *chosen], why)


def choose(config: Mapping[str, Any], typed: set[str]) -> tuple[list[str], str]:
    """The words of the best layout, and a sentence that says what it is and why."""
    check_keys_and_types(dict(config))
    check_ranges(flatten(dict(config)))
    config = with_detected(config)
    if reason := why_not(config):
        return without_figures(config, typed, reason)
    found = [p for p in search(config, typed) if installed(p.layout.strategy)]
    if not found:
        fix = "fewer of the degrees and batch sizes that are typed, or a strategy by its name"
        raise bad("strategy", AUTO, "no layout keeps the rules with these settings", fix)
    best = found[0]
    if not best.fits and not config["force"]:
        limit = gib(best.task.hardware.gpu_memory_gib)
        rule = f"no layout fits: the leanest, {described(best)}, needs {gib(best.memory_bytes / GIB)} of {limit} a GPU"
        raise bad("strategy", AUTO, rule, "more GPUs (dtrain plan says how many), or a smaller model")
    return words(best, config), described(best) + margin(best, found)


def without_figures(config: Mapping[str, Any], typed: set[str], reason: str) -> tuple[list[str], str]:
    """Nothing can be ranked. Without a GPU what fits in the machine's memory is trained the plain way."""
    shape = shape_of(config)
    here = "gpus_per_node" not in config["cluster"]
    if shape is None:
        raise bad("strategy", AUTO, reason, "a strategy by its name: strategy=fsdp")
    if gpus_per_node(config["cluster"]) or not here or any(name.startswith("strategy.") for name in typed):
        fix = f"hardware=NAME ({', '.join(options_of('hardware'))}), or measure it: dtrain plan calibrate"
        raise bad("strategy", AUTO, f"there is nothing to compare layouts by: {reason}", fix)
    ranks = world_size(config)
    needs = ranks * total(memory(shape, layout_of({**config, **plain_ddp(config)})))
    has = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    if needs > has:
        rule = f"{ranks} copies of the model need {gib(needs / GIB)} under ddp, and this machine has {gib(has / GIB)}"
        raise bad("strategy", AUTO, rule, "cluster.processes=1, strategy=fsdp, or a smaller model")
    return ["strategy=ddp"], f"ddp: there is no GPU here, and {ranks} copies of the model fit in this machine's memory"


def plain_ddp(config: Mapping[str, Any]) -> dict[str, Any]:
    return {"strategy": strategy_section("ddp"), "choices": {**config["choices"], "strategy": "ddp"}}


def described(prediction: Prediction) -> str:
    """`3d, tp 2 × pp 4 × dp 8, micro-batch 4, full checkpointing`"""
    layout = prediction.layout
    axes = {axis: getattr(layout, axis) for axis in ("tp", "pp", "dp")}
    parts = [layout.strategy, " × ".join(f"{axis} {size}" for axis, size in axes.items() if size > 1)]
    parts += [f"micro-batch {layout.micro_batch_size}"]
    if layout.activation_checkpointing != "none":
        parts.append(f"{layout.activation_checkpointing} checkpointing")
    if layout.offload != "none":
        parts.append(f"offload to {layout.offload}")
    return ", ".join(part for part in parts if part)


def margin(best: Prediction, found: list[Prediction]) -> str:
    """How much faster it is than the best of another strategy, if another fits."""
    others = [p for p in found if p.fits and p.step_s and p.layout.strategy != best.layout.strategy]
    if best.step_s is None or not best.fits:
        return ""
    if not others:
        return ": no other strategy fits"
    second = min(others, key=lambda p: p.step_s or 0.0)
    faster = (second.step_s or 0.0) / best.step_s - 1
    how = f"{faster:.0%} faster than" if faster >= 0.01 else "as fast as, and simpler than,"
    return f": {step_time(best.step_s)} a step, {how} {second.layout.strategy}"


def recompose(cfg: DictConfig, overrides: list[str], why: str) -> None:
    """Compose with other words, in place: Hydra makes the folder, and writes .hydra/, from this very object."""
    record = cfg if "hydra" in cfg else HydraConfig.instance().cfg  # a sweep's job comes without
    assert isinstance(record, DictConfig)
    new = GlobalHydra.instance().config_loader().load_sweep_config(record, overrides)
    raw = OmegaConf.to_container(OmegaConf.masked_copy(new, [str(k) for k in new if k != "hydra"]))
    assert isinstance(raw, dict)
    fixed = ("run_dir",) if HydraConfig.get().mode == RunMode.MULTIRUN or "hydra" not in cfg else ()
    with read_write(cfg), open_dict(cfg):
        for key, value in raw.items():
            if key not in fixed:
                cfg[key] = value
    with read_write(record.hydra), open_dict(record.hydra):
        record.hydra.runtime.choices = {**new.hydra.runtime.choices, AUTO: why}
        record.hydra.overrides.task = new.hydra.overrides.task
    HydraConfig.instance().set_config(record)
