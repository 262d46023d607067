"""A configuration to plan for: composed as the launch would, without what only a launch needs.

Data files, submitit, DeepSpeed and a scheduler are not asked for: a plan is made on a login node or a laptop.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dtrain import validate
from dtrain.config import CONF, bad, flatten, gpus_per_node, ranks_per_node, section, yaml_loader
from dtrain.explain import GROUPS, explain, options_of
from dtrain.hardware import half_precision
from dtrain.mesh import MeshSizes
from dtrain.plan import quick
from dtrain.plan.predict import assumed_network, usual_network
from dtrain.plan.sections import strategy_section, with_detected
from dtrain.ranges import check_ranges
from dtrain.redaction import check_arguments
from dtrain.schema import check_keys_and_types
from dtrain.untrusted_config import quick_yaml, read_text, resolved

SLURM_GPUS = 8  # conf/cluster/slurm.yaml's gpus_per_node


@dataclass
class Question:
    """What is to be planned: the composed settings, which of them were typed or come from a recipe, and remarks."""

    config: dict[str, Any]
    typed: frozenset[str]
    words: list[str]  # as they were typed, to be typed again for a launch
    notes: list[str] = field(default_factory=list)
    config_dir: str | None = None  # a folder of the user's own beside conf/

    @property
    def is_one_layout(self) -> bool:
        """Were a strategy and its degrees given, so that there is one layout to predict and none to look for?

        A recipe, or a run that goes on, is complete: unless strategy=auto was typed, it is what it says.
        """
        if "strategy=auto" not in self.words and {"recipe", "resume"} & self.typed:
            return True
        if "strategy" not in self.typed:
            return False
        strategy = self.config["strategy"]
        degrees = [f"strategy.{axis}" for axis in ("tp", "pp") if axis in strategy]
        if not degrees:  # data parallel only: all ranks, and the batch of each says the rest
            degrees = ["train.micro_batch_size"] if "strategy.dp" not in self.typed else []
        return all(degree in self.typed for degree in degrees)


def compose(words: list[str], config_dir: str | None = None) -> Question:
    """The settings that the words describe, checked for all that matters to a plan.

    config_dir: a folder of one's own with hardware/NAME.yaml or the like, as the launcher's --config-dir.
    """
    check_arguments(words)
    given = dict(word.split("=", 1) for word in words if "=" in word)
    typed = {key.lstrip("+") for key in given} | recipe_keys(given.get("recipe"))
    if re.fullmatch(r"[^\W\d]\w*(\.\w+)+", given.get("model", "")):
        raise own_model(given["model"])
    asked = list(words)
    if given.get("strategy") == "auto":
        asked.remove("strategy=auto")
        typed -= {key for key in typed if key == "strategy" or (key.startswith("strategy.") and key not in given)}
    if config_dir is not None:
        if not Path(config_dir).expanduser().is_dir():
            raise bad("--config-dir", config_dir, "there is no such folder", "a folder with hardware/NAME.yaml in it")
        from dtrain.arguments import quote

        asked.append(f"hydra.searchpath=[{quote('file://' + str(Path(config_dir).expanduser().absolute()))}]")
    notes: list[str] = []
    if "strategy" not in typed and (wanted := [k[9:] for k in typed if k.startswith("strategy.")]):
        asked.append(f"strategy={strategy_with(wanted)}")  # so that what is typed is checked; the search looks at all
    several = given.get("cluster.nodes", "1") != "1" or "cluster.gpus_per_node" in given
    if implied := several and "cluster" not in typed:
        asked.append("cluster=slurm")
    try:
        config = composed(asked)
        default_gpus = config["cluster"].get("gpus_per_node")
        config = with_detected(config)
        set_nodes(config, typed, notes)
        set_precision(config, typed, notes)
        check(config)
    except mistakes() as error:
        raise ValueError(explain(error)) from error
    if assumed_network(config):
        name = config["choices"]["hardware"]
        notes.append(f"hardware={name} says nothing about a network: that of {usual_network(config)} was taken")
    if implied:
        notes.append("planned for cluster=slurm; launch with the cluster that is yours")
        words = [*words, "cluster=slurm"]
    words = [*words, *ranks_said(config, typed, default_gpus)]
    return Question(config, frozenset(typed), words, notes, config_dir)


def ranks_said(config: dict[str, Any], typed: set[str], default_gpus: int | None) -> list[str]:
    """The words that give a launch the ranks which were planned: elsewhere its own defaults would count the GPUs."""
    cluster = config["cluster"]
    if config["choices"]["cluster"] == "local":
        told = "hardware" not in typed or "cluster.processes" in typed
        return [] if told else [f"cluster.processes={cluster['processes']}"]
    same = cluster.get("gpus_per_node") == default_gpus
    return [] if same else [f"cluster.gpus_per_node={cluster['gpus_per_node']}"]


def own_model(model: str | None) -> ValueError:
    rule = "is not one of dtrain's models, and its sizes are not known without building it"
    return bad("model", model, rule, "one of dtrain's with sizes like yours, e.g. model=llama-7b model.num_layers=24")


def mistakes() -> tuple[type[Exception], ...]:
    """A person's, not ours. Asked for when there is one: the imports take 100 ms."""
    from hydra.errors import HydraException
    from omegaconf.errors import OmegaConfBaseException

    return HydraException, OmegaConfBaseException, ValueError, OSError


def composed(words: list[str]) -> dict[str, Any]:
    """The composition as plain values, with keys and types checked: by Hydra, unless it is easy."""
    config = quick.composed(words)
    return by_hydra(words) if config is None else config


def by_hydra(words: list[str]) -> dict[str, Any]:
    import hydra
    from hydra.core.hydra_config import HydraConfig
    from omegaconf import OmegaConf

    with quick_yaml(), hydra.initialize_config_dir(str(CONF), version_base="1.3"):
        cfg = hydra.compose("config", prepare(words), return_hydra_config=True)
    HydraConfig.instance().set_config(cfg)
    config = resolved(cfg, words)
    check_keys_and_types(config)
    choices: Any = OmegaConf.to_container(cfg.hydra.runtime.choices)
    return {**config, "choices": {g: choices.get(g) for g in (*GROUPS, "recipe")}}


def prepare(words: list[str]) -> list[str]:
    """Words as Hydra takes them. Reading all recipes takes 90 ms, so only where one is named."""
    from dtrain.arguments import offer_own, prepare_arguments

    if any(word.startswith(("recipe=", "resume=")) for word in words):
        return prepare_arguments(words)
    groups = "|".join(GROUPS)
    words = [re.sub(rf"^\++({groups})=", r"\1=", word) for word in words]
    for word in words:
        group, _, option = word.partition("=")
        if group in GROUPS and re.search(r"^(null)?$|\[|\.\.|\.ya?ml$", option):
            raise bad(
                group, option, f"names one option of conf/{group}/", f"{group} can be {', '.join(options_of(group))}"
            )
    return offer_own(words)


def recipe_keys(recipe: str | None) -> set[str]:
    """The settings and groups that a recipe says: as good as typed. What is wrong with it, composing will tell."""
    if not recipe:
        return set()
    import yaml

    from dtrain.arguments import built_in

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
    """A strategy that has all these settings, or as many as one has."""
    sections = {name: strategy_section(name) for name in options_of("strategy")}
    return max(sections, key=lambda name: sum(setting in sections[name] for setting in settings))


def set_nodes(config: dict[str, Any], typed: set[str], notes: list[str]) -> None:
    """Fill in the ranks of a node from the hardware, where the configuration leaves them to the machine."""
    cluster, size = config["cluster"], config["hardware"].get("gpus_per_node")
    if config["choices"]["cluster"] == "local":
        if cluster["nodes"] != 1:
            raise bad(
                "cluster.nodes", cluster["nodes"], "cluster=local is one machine", "cluster=slurm, or leave it out"
            )
        if cluster["processes"] is None:
            here = 0 if "hardware" in typed else gpus_per_node(cluster)
            cluster["processes"] = here or size or ranks_per_node(cluster)
        most = size and max(size, 8)  # machines with one such card have brothers with more
    else:
        said, name = cluster.get("gpus_per_node"), config["choices"]["hardware"]
        # the default is nobody's word; a cluster's own file that says another number is
        if "cluster.gpus_per_node" not in typed and said == SLURM_GPUS and size and size != said:
            if size > 1:
                cluster["gpus_per_node"] = size
                notes.append(f"a node has {size} GPUs, by hardware={name}; others: cluster.gpus_per_node=…")
            else:  # a file about one card says nothing about how many of them a node has
                notes.append(f"a node with {said} GPUs was taken; others: cluster.gpus_per_node=…")
        cluster["processes"] = ranks_per_node(cluster)
        most = cluster.get("gpus_per_node") or None
    if most and cluster["processes"] > most and config["hardware"].get("gpu"):
        rule = f"a node has {most} GPUs, and ranks that share one are not predicted"
        raise bad("cluster.processes", cluster["processes"], rule, f"cluster.nodes=… with {most} ranks each")


def set_precision(config: dict[str, Any], typed: set[str], notes: list[str]) -> None:
    """16 bits where nobody said otherwise: the default of fp32 is for CPUs, and nobody wants it on these GPUs."""
    gpu = config["hardware"].get("gpu")
    name = half_precision(gpu)
    if name == "fp16" and config["precision"].get("dtype") == "bfloat16":
        rule = f"{gpu} has no tensor cores for it: it would run at a fraction of fp16's speed"
        raise bad("precision", config["choices"]["precision"], rule, "precision=fp16")
    if "precision" in typed or "recipe" in typed or "resume" in typed or name is None:
        return
    config["precision"] = dict(section("precision", name))
    config["choices"]["precision"] = name
    notes.append(f"precision={name} was chosen, as you typed none; the launcher's default is fp32")


# ---- what a plan needs to be right ---------------------------------------------------------------------------


def check(config: dict[str, Any]) -> None:
    """The launcher's rules that do not depend on where a run is started and on which data it reads."""
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
