"""`strategy=auto`: replace it with the fastest layout that fits, before anything reads the configuration."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf, open_dict, read_write

from dtrain.config import elastic
from dtrain.config.files import flatten, options_of
from dtrain.config.hardware import gpus_per_node, half_precision, ranks_per_node, world_size
from dtrain.config.ranges import check_ranges
from dtrain.config.schema import check_keys_and_types
from dtrain.errors import bad
from dtrain.launch.options import AUTO, STAND_IN
from dtrain.plan import run_prediction
from dtrain.plan.host_memory import cpu_bytes, fitting, machine_bytes, of_ranks
from dtrain.plan.memory.activations import GIB
from dtrain.plan.model_shape import shape_of
from dtrain.plan.predict import why_not
from dtrain.plan.report import lacking
from dtrain.plan.run_prediction import left_out
from dtrain.plan.search.explain_choice import name, tight_note, why
from dtrain.plan.search.search import overrides_of, search
from dtrain.plan.sections import missing_package, strategy_section, with_detected
from dtrain.util.format import counted, gib
from dtrain.util.host_memory import described


def settle(cfg: DictConfig, config: Mapping[str, Any]) -> None:
    """Choose a layout; change cfg and Hydra's record as if the user had typed the chosen overrides.

    config: cfg as plain values, as far as they are known without a strategy.
    """
    if found := elastic.range_of(config):
        rule = f"the planner chooses for one number of ranks, and {found} is several"
        raise bad("strategy", AUTO, rule, "choose a strategy: strategy=fsdp")
    hydra = HydraConfig.get()
    overrides = [str(word) for word in hydra.overrides.task]
    typed = {word.partition("=")[0].lstrip("+~") for word in overrides} - {"strategy"}
    typed |= recipe_settings(config["choices"]["recipe"])
    if config["resume"] and "batch_norm" in config["model"]:
        typed.add("train.micro_batch_size")  # batch norm statistics depend on the micro-batch size
    given = {key for key in config["strategy"] if key in STAND_IN or f"strategy.{key}" in typed}
    asked = {**config, "strategy": {key: config["strategy"][key] for key in given}}
    try:
        chosen, sentence = choose(asked, typed)
    except Exception as error:
        if isinstance(error, ValueError) or run_prediction.strict():
            raise
        rule = f"the planner failed ({type(error).__name__}: {error})"  # a planner bug must not block the user
        raise bad("strategy", AUTO, rule, "choose a strategy: strategy=fsdp") from error
    kept = [word for word in overrides if not word.lstrip("+").startswith(("strategy=", "strategy."))]
    recompose(cfg, [*kept, *chosen, *unsaid(config["strategy"], typed, chosen)], sentence)


def recipe_settings(name: str | None) -> set[str]:
    """Return the settings that a recipe fixes, except its strategy. A resumed run is not a recipe."""
    if name is None or name == "as-run":
        return set()
    content: Any = OmegaConf.to_container(ConfigStore.instance().load(f"recipe/{name}.yaml").node)
    return {key for key in flatten(content) if not key.startswith(("strategy", "defaults"))}


def unsaid(section: Mapping[str, Any], typed: set[str], chosen: list[str]) -> list[str]:
    """Return overrides that reset the recipe's settings for its original strategy."""
    target = strategy_section(chosen[0].partition("=")[2])
    given = {word.partition("=")[0] for word in chosen} | typed
    recipes = [key for key, value in section.items() if value != STAND_IN.get(key) and f"strategy.{key}" not in given]
    return [f"strategy.{k}={json.dumps(target[k])}" if k in target else f"~strategy.{k}" for k in recipes]


def choose(config: Mapping[str, Any], typed: set[str]) -> tuple[list[str], str]:
    """Return the overrides of the best layout, strategy first, and a sentence that describes and justifies it."""
    check_keys_and_types(dict(config))
    check_ranges(flatten(dict(config)))
    config = with_detected(dict(config))
    if reason := why_not(config):
        return without_predictions(config, typed, reason)
    found = [p for p in search(config, typed, time_unfit=False) if not missing_package(p.layout.strategy)]
    if not found:
        fix = "give fewer of the degrees and batch sizes, or choose a strategy: strategy=fsdp"
        raise bad("strategy", AUTO, "no layout is valid with these settings", fix)
    best = found[0]
    if best.fits is False and not config["force"]:
        rule = f"no layout fits: the smallest, {name(best.layout)}, {lacking(best)}"
        raise bad("strategy", AUTO, rule, "more GPUs (dtrain plan … --gpus-for 30d finds how many), or a smaller model")
    chosen = overrides_of(best, config)
    remarks = [f" {note}." for note in tight_note(found)]
    text = f"{why(found, config).removesuffix('.')}{planned_for(config, typed)}."
    return chosen, f"{text}{''.join(remarks)} As overrides: {' '.join(chosen)}"


def planned_for(config: Mapping[str, Any], typed: set[str]) -> str:
    """Name the defaults that decide most: a plan for two ranks in fp32 is seldom what was meant."""
    cluster, defaults, change = config["cluster"], [], []
    if config["choices"]["cluster"] == "local":
        if "cluster.processes" not in typed:
            defaults.append(counted(world_size(config), "rank"))
            change.append("cluster.processes=…")
    elif "cluster.nodes" not in typed and cluster["nodes"] == 1:
        defaults.append(f"1 node of {counted(ranks_per_node(cluster), 'rank')}")
        change.append("cluster.nodes=…")
    if config["choices"]["precision"] == "fp32" and "precision" not in typed and not config["resume"]:
        defaults.append("fp32")
        change.append(f"precision={half_precision(config['hardware'].get('gpu')) or 'bf16'}")
    return f"; planned for the default {' and '.join(defaults)} (to change it: {' '.join(change)})" if defaults else ""


def without_predictions(config: Mapping[str, Any], typed: set[str], reason: str) -> tuple[list[str], str]:
    """Choose without a ranking: without a GPU, use ddp if all copies fit in the machine's memory."""
    shape = shape_of(config)
    here = "gpus_per_node" not in config["cluster"]
    if shape is None:
        raise bad("strategy", AUTO, reason, "choose a strategy: strategy=fsdp")
    if gpus_per_node(config["cluster"]) or not here or any(key.startswith("strategy.") for key in typed):
        known = ", ".join(option for option in options_of("hardware") if option not in ("cpu", "unknown"))
        fix = f"hardware=NAME ({known}), or measure it: dtrain plan calibrate"
        raise bad("strategy", AUTO, f"layouts cannot be compared: {reason}", fix)
    ranks = world_size(config)
    needs, has = cpu_bytes({**config, **plain_ddp(config)}), machine_bytes()
    if needs > has:
        rule = f"training needs {of_ranks(needs, ranks)} under ddp, {described(has)} {gib(has / GIB)}"
        rule += f", and there is no GPU here{planned_for(config, typed)}"
        raise bad("strategy", AUTO, rule, smaller(config, typed, has))
    copies = "the model fits" if ranks == 1 else f"{ranks} copies of the model fit"
    text = f"ddp: there is no GPU here, and {copies} in this machine's memory"
    return ["strategy=ddp"], f"{text}{planned_for(config, typed)}"


def smaller(config: Mapping[str, Any], typed: set[str], has: float) -> str:
    """Return the smallest change that fits, as overrides: they replace strategy=auto."""
    base = {**config, **plain_ddp(config)}
    # batch norm statistics depend on the micro-batch
    keep_batch = "train.micro_batch_size" in typed or "batch_norm" in config["model"]
    if found := fitting(base, has, keep_batch):
        words, needs = found
        chosen = words if "strategy=fsdp" in words else ["strategy=ddp", *words]
        return f"{' '.join(chosen)}{left_out(base, words)} ({gib(needs / GIB)})"
    return "a machine with GPUs or more memory, or a smaller model"


def plain_ddp(config: Mapping[str, Any]) -> dict[str, Any]:
    return {"strategy": strategy_section("ddp"), "choices": {**config["choices"], "strategy": "ddp"}}


def recompose(cfg: DictConfig, overrides: list[str], sentence: str) -> None:
    """Compose again with other overrides, in place: Hydra creates the folder and .hydra/ from this same object."""
    record = cfg if "hydra" in cfg else HydraConfig.instance().cfg  # a sweep's job has no `hydra` key
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
        record.hydra.runtime.choices = {**new.hydra.runtime.choices, AUTO: sentence}
        record.hydra.overrides.task = new.hydra.overrides.task
    HydraConfig.instance().set_config(record)
