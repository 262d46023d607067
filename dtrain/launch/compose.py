"""Compose a configuration without launching a run: for `dtrain env`, `plan`, `preflight`, `search` and `verify`.

Only `hydra_config` and the launcher (launch/app.py) compose conf/.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import hydra
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import InterpolationKeyError

from dtrain.checks.network import check
from dtrain.config import run_length
from dtrain.config.files import CONF, GROUPS, SEVERAL
from dtrain.config.hydra_errors import MISTAKES, explain
from dtrain.config.needed import missing
from dtrain.config.schema import check_keys_and_types
from dtrain.config.untrusted import resolved
from dtrain.launch import compose_cache
from dtrain.launch.arguments import prepare_arguments
from dtrain.launch.script_arguments import main_config


def hydra_config(overrides: Sequence[str]) -> DictConfig:
    """Compose conf/ with these overrides; Hydra's own settings are under `hydra`."""
    with compose_cache.cached_files(), hydra.initialize_config_dir(str(CONF), version_base="1.3"):
        cfg = hydra.compose("config", list(overrides), return_hydra_config=True)
    HydraConfig.instance().set_config(cfg)
    return cfg


def plain_config(argv: list[str]) -> dict[str, Any]:
    """Return plain values and `choices` from overrides as a user types them; keys and types are checked."""
    overrides = prepare_arguments(argv)
    if main_config(overrides) == "script":
        raise ValueError(
            "script: only `launch` runs a program of your own\n  fix: leave out script=, or dtrain launch …"
        )
    cfg = hydra_config(overrides)
    choices: Any = OmegaConf.to_container(cfg.hydra.runtime.choices)
    try:
        config = resolved(cfg, overrides)
    except InterpolationKeyError as error:
        if text := missing(error, choices, cfg, overrides):
            raise ValueError(text) from error
        raise
    run_length.keep_one_length(config, overrides)
    check_keys_and_types(config)
    chosen = {group: choices.get(group) for group in (*GROUPS, "recipe")}
    return {**config, "choices": chosen | {group: ",".join(config[group]) or "none" for group in SEVERAL}}


def compose(argv: list[str]) -> dict[str, Any]:
    """Like `plain_config`, but also check the network profile; every error becomes a ValueError with an explanation.

    Lighter than the launcher: it skips rules that only training needs (batch size divides over ranks, data exists).
    """
    try:
        for word in argv:
            if word.startswith("-"):
                raise ValueError(f"{word}: is not a setting\n  fix: key=value, e.g. cluster=gcp-ethernet")
        config = plain_config(argv)
        check(config)
    except MISTAKES as error:
        raise ValueError(explain(error)) from error
    return config
