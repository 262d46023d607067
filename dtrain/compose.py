"""A configuration from the command line for `dtrain env`, `preflight` and `search`: composed, but not a run.

Lighter than the launcher's: what only training needs (a batch that fits the ranks, data that exists) is not asked for.
"""

from __future__ import annotations

from typing import Any

import hydra
from hydra.core.hydra_config import HydraConfig
from omegaconf import OmegaConf

from dtrain.arguments import prepare_arguments
from dtrain.comm.rules import check
from dtrain.config import CONF
from dtrain.explain import explain
from dtrain.launch import MISTAKES
from dtrain.schema import check_keys_and_types
from dtrain.untrusted_config import resolved


def compose(argv: list[str]) -> dict[str, Any]:
    """The settings that the words describe, as plain values, with keys, types and the profile checked."""
    try:
        for word in argv:
            if word.startswith("-"):
                raise ValueError(f"{word}: is no setting\n  fix: key=value, e.g. cluster=gcp-ethernet")
        arguments = prepare_arguments(argv)
        with hydra.initialize_config_dir(str(CONF), version_base="1.3"):
            cfg = hydra.compose("config", arguments, return_hydra_config=True)
        HydraConfig.instance().set_config(cfg)
        config = resolved(cfg, arguments)
        check_keys_and_types(config)
        check(config)
    except MISTAKES as error:
        raise ValueError(explain(error)) from error
    choices = OmegaConf.to_container(cfg.hydra.runtime.choices)
    assert isinstance(choices, dict)
    return {**config, "choices": {str(k): v for k, v in choices.items() if "/" not in str(k)}}
