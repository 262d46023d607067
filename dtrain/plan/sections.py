"""Read configuration sections without composing, and apply the launcher's rules for a strategy's degrees.

Does not import Hydra: the ranks need this to compare a run with its prediction.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from typing import Any

from dtrain.checks import context, validate
from dtrain.checks import strategy as rules
from dtrain.config.files import section
from dtrain.config.mesh import MeshSizes
from dtrain.strategies import deepspeed_config
from dtrain.util.host_memory import total_bytes

# the settings of conf/strategy that a layout decides; typed ones are kept
CHOSEN = ("tp", "pp", "dp", "cp", "cp_kind", "schedule", "stages_per_rank", "data", "sequence_parallel",
          "loss_parallel", "sharding", "replica_size", "offload", "offload_params", "mode")  # fmt: skip


# if typed, they describe a GPU other than this machine's; a price or a rate applies to either
ANOTHER_GPU = ("gpu", "gpu_memory_gib", "usable_memory_gib")


def strategy_section(name: str) -> dict[str, Any]:
    """Return the defaults of a strategy from conf/strategy/NAME.yaml."""
    return dict(section("strategy", name))


def model_section(name: str) -> dict[str, Any]:
    return dict(section("model", name))


def with_detected(config: dict[str, Any]) -> dict[str, Any]:
    """On cluster=local without a hardware setting: use the detected GPU's values; typed values take precedence."""
    if config["choices"]["hardware"] != "unknown" or config["choices"]["cluster"] != "local":
        return config
    if any(config["hardware"].get(key) for key in ANOTHER_GPU):
        return config
    from dtrain.config.hardware import detect

    name = detect()
    if name is None:
        return config
    given = {key: value for key, value in config["hardware"].items() if value not in (None, "")}
    hardware = {**section("hardware", name), **this_host(name), **given}
    return {**config, "hardware": hardware, "choices": {**config["choices"], "hardware": name}}


def this_host(name: str) -> dict[str, float]:
    """Return this machine's own memory for offloading: a file only has what hosts of such GPUs usually have."""
    if name == "cpu":
        return {}
    return {"host_memory_gib": total_bytes() / 2**30}


def missing_package(strategy: str) -> tuple[str, str] | None:
    """Return the package that a strategy needs and that is missing here, and how to get it; None: nothing missing."""
    found = rules.PACKAGES.get(strategy_section(strategy)["_target_"].rpartition(".")[0])
    return found if found and importlib.util.find_spec(found[0]) is None else None


# ---- rules ---------------------------------------------------------------------------------------------------


def check_layout(config: dict[str, Any], sizes: MeshSizes, plans: bool = True) -> None:
    """Apply the launcher's rules for a strategy's degrees, except those that depend on the launching machine.

    plans: check that the model's class defines its sharding; this reads its source, so a search does it once.
    """
    if config["model"]["_target_"].startswith("dtrain."):
        validate.check_model(config["model"], sizes)
    strategy = config["strategy"]
    rules.check_precision_of(config)
    rules.check_state_of(config, sizes.tp)
    if "stage" in strategy:
        deepspeed_config.check(without_disk(config), sizes)
    context.check(config, sizes)
    if plans:
        rules.check_plans(config, sizes)
    rules.check_tensor(strategy, config["model"], config["data"], config["cluster"], sizes)
    if "replica_size" in strategy:
        rules.check_replicas(strategy, config["cluster"]["processes"], sizes)


def check_micro_batches(config: dict[str, Any], sizes: MeshSizes, micro_batches: int) -> None:
    """Apply the rules of a pipeline's schedule, which depend on the number of micro-batches."""
    if "schedule" in config["strategy"]:
        rules.check_pipeline(config, sizes, micro_batches)


def without_disk(config: Mapping[str, Any]) -> dict[str, Any]:
    """Replace nvme with cpu: only the launch, on the machine with that disk, checks the folder."""
    strategy = config["strategy"]
    if strategy["stage"] < 3 or "nvme" not in (strategy.get("offload"), strategy.get("offload_params")):
        return dict(config)
    swapped = {k: "cpu" if v == "nvme" and k != "nvme_path" else v for k, v in strategy.items()}
    return {**config, "strategy": swapped | {"nvme_path": None}}
