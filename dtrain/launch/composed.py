"""Cache Hydra's compositions: each takes 0.2 s, and Hydra makes three for every job of a sweep.

Hydra composes a command once for hydra.mode and once to run it. A job of a sweep is composed by our gate, by Hydra's
batch check and by its launcher. Each composition reads the files in conf/ again.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from hydra._internal.config_repository import ConfigRepository
from hydra._internal.hydra import Hydra
from hydra.core.config_search_path import ConfigSearchPath
from hydra.plugins.config_source import ConfigResult
from omegaconf import DictConfig, OmegaConf


@contextmanager
def mode_known(words: Sequence[str]) -> Iterator[None]:
    """Skip the composition that only reads hydra.mode, unless an override may set it; conf/ never sets it."""
    original = Hydra.get_mode
    may_set = re.compile(r"\W*hydra(/|=|\.mode|\.searchpath)|--config|-c[pnd]$")
    if not any(may_set.match(word) for word in words):
        Hydra.get_mode = lambda self, config_name, overrides: None  # type: ignore[method-assign]
    try:
        yield
    finally:
        Hydra.get_mode = original  # type: ignore[method-assign]


class KeptFiles(ConfigRepository):
    """Reads each Hydra config file once. A composition modifies the nodes it gets, so it gets copies."""

    def initialize_sources(self, config_search_path: ConfigSearchPath) -> None:
        super().initialize_sources(config_search_path)
        self.kept: dict[str, ConfigResult | None] = {}

    def load_config(self, config_path: str) -> ConfigResult | None:
        if config_path not in self.kept:
            self.kept[config_path] = super().load_config(config_path)
        return copy.deepcopy(self.kept[config_path])

    def __deepcopy__(self, memo: dict[int, Any]) -> KeptFiles:
        """Copy for a composition, which may use other sources; `initialize_sources` then gives it its own cache."""
        return copy.copy(self)


def keep_jobs(loader: Any) -> None:
    """Make a Hydra config loader compose each job of a sweep once and return copies."""
    compose = loader.load_sweep_config
    loader.repository = KeptFiles(loader.config_search_path)
    kept: dict[tuple[str, ...], DictConfig] = {}

    def once(master_config: DictConfig, sweep_overrides: list[str]) -> DictConfig:
        words = tuple(sweep_overrides)
        if words not in kept:
            kept[words] = compose(master_config, sweep_overrides)
        config = copy.deepcopy(kept[words])
        OmegaConf.copy_cache(from_config=master_config, to_config=config)  # ${now:} stays the first job's
        return config

    loader.load_sweep_config = once
