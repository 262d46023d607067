"""Sections of a configuration without composing one, and the launcher's rules for a strategy's degrees.

Without Hydra: the ranks import what holds a run against its prediction, and that needs these.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from typing import Any

from dtrain import validate
from dtrain.config import section
from dtrain.host_memory import total_bytes
from dtrain.mesh import MeshSizes
from dtrain.strategies import rules, zero_config

# the settings of conf/strategy that a layout decides; a typed one is kept
CHOSEN = ("tp", "pp", "dp", "schedule", "stages_per_rank", "data", "sequence_parallel", "loss_parallel", "sharding",
          "replica_size", "offload", "offload_params", "mode")  # fmt: skip


# typed, they are about another GPU than this machine's; a price or a rate is about whichever it is
ANOTHER_GPU = ("gpu", "gpu_memory_gib", "usable_memory_gib")


def strategy_section(name: str) -> dict[str, Any]:
    """The defaults of a strategy, from conf/strategy/NAME.yaml."""
    return dict(section("strategy", name))


def model_section(name: str) -> dict[str, Any]:
    return dict(section("model", name))


def with_detected(config: dict[str, Any]) -> dict[str, Any]:
    """On cluster=local, where nobody has said what this machine is: the figures of its GPUs, under those typed."""
    if config["choices"]["hardware"] != "unknown" or config["choices"]["cluster"] != "local":
        return config
    if any(config["hardware"].get(key) for key in ANOTHER_GPU):
        return config
    from dtrain.hardware import detect

    name = detect()
    if name is None:
        return config
    said = {key: value for key, value in config["hardware"].items() if value not in (None, "")}
    hardware = {**section("hardware", name), **this_host(name), **said}
    return {**config, "hardware": hardware, "choices": {**config["choices"], "hardware": name}}


def this_host(name: str) -> dict[str, float]:
    """This machine's own memory, for what is offloaded: a file can only say what hosts of such GPUs usually have."""
    if name == "cpu":
        return {}
    return {"host_memory_gib": total_bytes() / 2**30}


def missing_package(strategy: str) -> str | None:
    """The package that a strategy needs and this machine has not; None: it can be started here."""
    package = rules.EXTRAS.get(strategy_section(strategy)["_target_"].rpartition(".")[0])
    return None if package is None or importlib.util.find_spec(package) else package


# ---- rules ---------------------------------------------------------------------------------------------------


def check_layout(config: dict[str, Any], sizes: MeshSizes, micro_batches: int, plans: bool = True) -> None:
    """The launcher's rules for a strategy's degrees, without what only the launching machine can say.

    plans: whether the model's class says how it is cut; its source is read for that, so a search asks once.
    """
    if config["model"]["_target_"].startswith("dtrain."):
        validate.check_model(config["model"], sizes)
    strategy = config["strategy"]
    rules.check_precision_of(config)
    if "stage" in strategy:
        zero_config.check(without_disk(config), sizes)
    if plans:
        rules.check_plans(config, sizes)
    rules.check_tensor(strategy, config["model"], config["data"], config["cluster"], sizes)
    if "schedule" in strategy:
        rules.check_pipeline(config, sizes, micro_batches)
    if "replica_size" in strategy:
        rules.check_replicas(strategy, config["cluster"]["processes"], sizes)


def without_disk(config: Mapping[str, Any]) -> dict[str, Any]:
    """The settings with nvme spelt as cpu: the folder is looked at by the launch, on the machine that has it."""
    strategy = config["strategy"]
    if strategy["stage"] < 3 or "nvme" not in (strategy.get("offload"), strategy.get("offload_params")):
        return dict(config)
    swapped = {k: "cpu" if v == "nvme" and k != "nvme_path" else v for k, v in strategy.items()}
    return {**config, "strategy": swapped | {"nvme_path": None}}
