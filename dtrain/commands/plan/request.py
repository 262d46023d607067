"""Compose the configuration to plan for, like a launch does, but without what only a launch needs.

Needs no data files, submitit, DeepSpeed or scheduler: plans are made on a login node or a laptop.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dtrain.checks import validate
from dtrain.config import elastic
from dtrain.config.files import flatten, options_of, section, yaml_loader
from dtrain.config.hardware import gpus_per_node, half_precision, ranks_per_node
from dtrain.config.hydra_errors import MISTAKES, explain
from dtrain.config.mesh import MeshSizes
from dtrain.config.ranges import check_ranges
from dtrain.config.redaction import check_arguments
from dtrain.config.untrusted import read_text
from dtrain.errors import bad
from dtrain.launch.compose import plain_config
from dtrain.launch.quoting import quote
from dtrain.launch.recipes import built_in
from dtrain.plan.predict import Prediction, assumed_network, usual_network
from dtrain.plan.sections import strategy_section, with_detected
from dtrain.util.format import counted

SLURM_GPUS = 8  # conf/cluster/slurm.yaml's gpus_per_node


@dataclass
class Question:
    """The request: composed settings, which of them were typed or come from a recipe, and notes."""

    config: dict[str, Any]
    typed: frozenset[str]
    overrides: list[str]  # as typed, to be repeated for a launch
    notes: list[str] = field(default_factory=list)
    config_dir: str | None = None  # the user's own folder beside conf/

    @property
    def is_one_layout(self) -> bool:
        """Do the settings fix a strategy and its degrees, so that there is one layout to predict and nothing to search?

        A recipe or a resumed run is complete: unless strategy=auto was typed, its strategy is used as it is.
        """
        if "strategy=auto" not in self.overrides and {"recipe", "resume"} & self.typed:
            return True
        if "strategy" not in self.typed:
            return False
        strategy = self.config["strategy"]
        degrees = [f"strategy.{axis}" for axis in ("tp", "pp") if axis in strategy]
        if not degrees:  # data parallel only: the micro-batch size fixes the rest
            degrees = ["train.micro_batch_size"] if "strategy.dp" not in self.typed else []
        return all(degree in self.typed for degree in degrees)


def compose(overrides: list[str], config_dir: str | None = None) -> Question:
    """Compose the settings from the arguments and check everything that matters to a plan.

    config_dir: the user's own folder with hardware/NAME.yaml etc., like the launcher's --config-dir.
    """
    check_arguments(overrides)
    given = dict(word.split("=", 1) for word in overrides if "=" in word)
    typed = {key.lstrip("+") for key in given} | recipe_keys(given.get("recipe"))
    if re.fullmatch(r"[^\W\d]\w*(\.\w+)+", given.get("model", "")):
        raise own_model(given["model"])
    asked = list(overrides)
    if given.get("strategy") == "auto":
        asked.remove("strategy=auto")
        typed -= {key for key in typed if key == "strategy" or (key.startswith("strategy.") and key not in given)}
    if config_dir is not None:
        if not Path(config_dir).expanduser().is_dir():
            raise bad("--config-dir", config_dir, "there is no such folder", "a folder with hardware/NAME.yaml in it")
        asked.append(f"hydra.searchpath=[{quote('file://' + str(Path(config_dir).expanduser().absolute()))}]")
    notes: list[str] = []
    if "strategy" not in typed and (wanted := [k[9:] for k in typed if k.startswith("strategy.")]):
        asked.append(f"strategy={strategy_with(wanted)}")  # to check typed settings; the search covers all strategies
    several = given.get("cluster.nodes", "1") != "1" or "cluster.gpus_per_node" in given
    if implied := several and "cluster" not in typed:
        asked.append("cluster=slurm")
    try:
        config = plain_config(asked)
        if found := elastic.range_of(config):
            config = elastic.sized(config, found.high)
            notes.append(f"planned for {found.high} {found.unit}s, the largest number of {found}")
        default_gpus = config["cluster"].get("gpus_per_node")
        config = with_detected(config)
        set_nodes(config, typed, notes)
        set_precision(config, typed, notes)
        check(config)
    except MISTAKES as error:
        raise ValueError(explain(error)) from error
    if assumed_network(config):
        name = config["choices"]["hardware"]
        notes.append(f"hardware={name} has no network rates: those of {usual_network(config)} are used")
    if implied:
        notes.append("planned for cluster=slurm; launch with your own cluster=NAME")
        overrides = [*overrides, "cluster=slurm"]
    overrides = [*overrides, *ranks_override(config, typed, default_gpus)]
    return Question(config, frozenset(typed), overrides, notes, config_dir)


def ranks_override(config: dict[str, Any], typed: set[str], default_gpus: int | None) -> list[str]:
    """Return overrides that give a launch the planned ranks: on another machine the defaults would count its GPUs."""
    cluster = config["cluster"]
    if config["choices"]["cluster"] == "local":
        is_implied = "hardware" not in typed or "cluster.processes" in typed
        return [] if is_implied else [f"cluster.processes={cluster['processes']}"]
    same = cluster.get("gpus_per_node") == default_gpus
    return [] if same else [f"cluster.gpus_per_node={cluster['gpus_per_node']}"]


def own_model(model: str | None) -> ValueError:
    rule = "is not one of dtrain's models, and its sizes are not known without building it"
    return bad("model", model, rule, "one of dtrain's with sizes like yours, e.g. model=llama-7b model.num_layers=24")


def recipe_keys(recipe: str | None) -> set[str]:
    """Return the settings and groups that a recipe sets; they count as typed. Composing reports its errors."""
    if not recipe:
        return set()
    import yaml

    path = built_in().get(recipe) or Path(recipe).expanduser()
    try:
        content = yaml.load(read_text(path), yaml_loader())
    except (OSError, ValueError, yaml.YAMLError):
        return set()
    if not isinstance(content, dict):
        return set()
    defaults = content.pop("defaults", None)
    entries = defaults if isinstance(defaults, list) else []
    chosen = [str(key) for entry in entries if isinstance(entry, dict) for key in entry]
    return set(flatten(content)) | {name.removeprefix("override ").strip("/") for name in chosen}


def strategy_with(settings: list[str]) -> str:
    """Find the strategy that has the most of these settings."""
    sections = {name: strategy_section(name) for name in options_of("strategy")}
    return max(sections, key=lambda name: sum(setting in sections[name] for setting in settings))


def set_nodes(config: dict[str, Any], typed: set[str], notes: list[str]) -> None:
    """Fill in the ranks per node from the hardware, if the configuration leaves them to the machine."""
    cluster, size = config["cluster"], config["hardware"].get("gpus_per_node")
    if config["choices"]["cluster"] == "local":
        if cluster["nodes"] != 1:
            raise bad(
                "cluster.nodes", cluster["nodes"], "cluster=local is one machine", "cluster=slurm, or leave it out"
            )
        if cluster["processes"] is None:
            here = 0 if "hardware" in typed else gpus_per_node(cluster)
            cluster["processes"] = here or size or ranks_per_node(cluster)
            if size and not here:
                what = "one card" if size == 1 else f"a node with {size}"
                source = f"hardware={config['choices']['hardware']} describes {what}"
                notes.append(f"planned for {counted(size, 'GPU')}, as {source}; to change it: cluster.processes=…")
            elif not size:
                ranks = counted(cluster["processes"], "rank")
                notes.append(f"planned for {ranks}, the launcher's default here; to change it: cluster.processes=…")
        most = size and max(size, 8)  # similar machines exist with more such cards
    else:
        configured, name = cluster.get("gpus_per_node"), config["choices"]["hardware"]
        # the default is not a user's choice; a different number in a cluster's own file is
        if "cluster.gpus_per_node" not in typed and configured == SLURM_GPUS and size and size != configured:
            if size > 1:
                cluster["gpus_per_node"] = size
                notes.append(f"a node has {size} GPUs, by hardware={name}; to change it: cluster.gpus_per_node=…")
            else:  # a file for one card does not define the number of cards per node
                notes.append(f"a node with {configured} GPUs is assumed; to change it: cluster.gpus_per_node=…")
        cluster["processes"] = ranks_per_node(cluster)
        if "cluster.nodes" not in typed and cluster["nodes"] == 1:
            notes.append("planned for 1 node, the default; to change it: cluster.nodes=…")
        most = cluster.get("gpus_per_node") or None
    if most and cluster["processes"] > most and config["hardware"].get("gpu"):
        rule = f"a node has {most} GPUs, and ranks that share a GPU cannot be predicted"
        raise bad("cluster.processes", cluster["processes"], rule, f"cluster.nodes=… with {most} ranks each")


def set_precision(config: dict[str, Any], typed: set[str], notes: list[str]) -> None:
    """Choose 16 bits unless a precision was given: the default fp32 is for CPUs, and too slow on these GPUs."""
    gpu = config["hardware"].get("gpu")
    name = half_precision(gpu)
    if name == "fp16" and config["precision"].get("dtype") == "bfloat16":
        rule = f"{gpu} has no tensor cores for it: it would run at a fraction of fp16's speed"
        raise bad("precision", config["choices"]["precision"], rule, "precision=fp16")
    if {"precision", "recipe", "resume"} & typed:
        return
    if name is None:
        notes.append(
            f"planned for precision={config['choices']['precision']}, the default; to change it: precision=bf16"
        )
        return
    config["precision"] = dict(section("precision", name))
    config["choices"]["precision"] = name
    notes.append(f"precision={name} was chosen, as you gave none; the launcher's default is fp32")


# ---- checks --------------------------------------------------------------------------------------------------


def check(config: dict[str, Any]) -> None:
    """Apply the launcher's rules that depend neither on the launching machine nor on the data."""
    skipped = ("data.", "cluster.", "run_dir", "name", "init_from", "logger.")
    flat = {key: value for key, value in flatten(config).items() if not key.startswith(skipped)}
    flat |= {f"cluster.{k}": config["cluster"].get(k) for k in ("nodes", "processes", "gpus_per_node")}
    check_ranges(flat)
    if config["model"]["_target_"].startswith("dtrain."):
        validate.check_model(config["model"], MeshSizes())
    validate.check_adapters(config)
    data, model = config["data"], config["model"]
    if data.get("seq_len") and model.get("seq_len") and data["seq_len"] > model["seq_len"]:
        rule = f"the model takes at most model.seq_len={model['seq_len']} tokens"
        raise bad("data.seq_len", data["seq_len"], rule, f"data.seq_len={model['seq_len']}")


def launch_command(question: Question, prediction: Prediction) -> str:
    """Return the full command line for a layout: the typed overrides, except those that the layout sets itself."""
    import shlex

    from dtrain.plan.search.search import overrides_of
    from dtrain.ui.console import LAUNCH

    chosen = overrides_of(prediction, question.config)
    if "precision" not in question.typed and question.config["choices"]["precision"] != "fp32":
        chosen.append(f"precision={question.config['choices']['precision']}")
    steps = math.ceil(prediction.task.samples / prediction.task.global_batch_size)
    if steps != question.config["train"]["steps"]:  # --tokens
        chosen.append(f"train.steps={steps}")
    chosen_keys = {word.partition("=")[0] for word in chosen}
    chosen_keys |= {"train.epochs"} if "train.steps" in chosen_keys else set()
    kept = [
        word
        for word in question.overrides
        if (key := word.partition("=")[0].lstrip("+")) not in chosen_keys and not key.startswith("strategy")
    ]
    typed = [w for w in question.overrides if w.startswith("strategy.") and w.partition("=")[0] not in chosen_keys]
    folder = ["--config-dir", question.config_dir] if question.config_dir else []
    return f"{LAUNCH} {shlex.join([*folder, *kept, *chosen, *others_of(typed, prediction)])}"


def others_of(typed: Sequence[str], prediction: Prediction) -> list[str]:
    """Return typed strategy settings that are not part of a layout, e.g. strategy.bucket_mb."""
    from dtrain.plan.sections import CHOSEN, strategy_section

    section = strategy_section(prediction.layout.strategy)
    return [w for w in typed if (key := w.partition("=")[0][9:]) in section and key not in CHOSEN]
