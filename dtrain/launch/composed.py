"""Compose once what Hydra composes again and again: 0.2 s each time, and three times for every job of a sweep.

A command is composed to learn hydra.mode and then to run. A job of a sweep is composed by our gate, by Hydra's check
of the batch and by its launcher. Each composition reads the files of conf/ anew.
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
    """Skip the composition that only asks for hydra.mode, which no file of ours sets, unless a word may set it."""
    original = Hydra.get_mode
    may_set = re.compile(r"\W*hydra(/|=|\.mode|\.searchpath)|--config|-c[pnd]$")
    if not any(may_set.match(word) for word in words):
        Hydra.get_mode = lambda self, config_name, overrides: None  # type: ignore[method-assign]
    try:
        yield
    finally:
        Hydra.get_mode = original  # type: ignore[method-assign]


class KeptFiles(ConfigRepository):
    """Hydra's configuration files, each read once. A composition changes the nodes that it gets, so it gets copies."""

    def initialize_sources(self, config_search_path: ConfigSearchPath) -> None:
        super().initialize_sources(config_search_path)
        self.kept: dict[str, ConfigResult | None] = {}

    def load_config(self, config_path: str) -> ConfigResult | None:
        if config_path not in self.kept:
            self.kept[config_path] = super().load_config(config_path)
        return copy.deepcopy(self.kept[config_path])

    def __deepcopy__(self, memo: dict[int, Any]) -> KeptFiles:
        """For each composition, which may name other sources; then `initialize_sources` gives it files of its own."""
        return copy.copy(self)


def keep_jobs(loader: Any) -> None:
    """Make a loader of Hydra's compose each job of a sweep once, and give a copy whenever it is asked for it."""
    compose = loader.load_sweep_config
    loader.repository = KeptFiles(loader.config_search_path)
    kept: dict[tuple[str, ...], DictConfig] = {}

    def once(master_config: DictConfig, sweep_overrides: list[str]) -> DictConfig:
        words = tuple(sweep_overrides)
        if words not in kept:
            kept[words] = compose(master_config, sweep_overrides)
        config = copy.deepcopy(kept[words])
        OmegaConf.copy_cache(from_config=master_config, to_config=config)  # ${now:} is what it was for the first job
        return config

    loader.load_sweep_config = once
