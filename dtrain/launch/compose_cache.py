"""Cache Hydra's compositions: without it each takes 0.2 s, and Hydra makes three for every job of a sweep.

Hydra composes a command once for hydra.mode and once to run it. A job of a sweep is composed by our gate, by Hydra's
batch check and by its launcher. Each composition reads the files in conf/ again.
"""

from __future__ import annotations

import copy
import os
import pickle
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, ClassVar

from hydra._internal import config_loader_impl, defaults_list
from hydra._internal.config_repository import ConfigRepository
from hydra._internal.hydra import Hydra
from hydra.core.object_type import ObjectType
from hydra.plugins.config_source import ConfigResult
from omegaconf import DictConfig, OmegaConf

from dtrain.config.untrusted import quick_yaml


@contextmanager
def mode_known(overrides: Sequence[str]) -> Iterator[None]:
    """Skip the composition that only reads hydra.mode, unless an override may set it; conf/ never sets it."""
    original = Hydra.get_mode
    may_set = re.compile(r"\W*hydra(/|=|\.mode|\.searchpath)|--config|-c[pnd]$")
    if not any(may_set.match(word) for word in overrides):
        Hydra.get_mode = lambda self, config_name, overrides: None  # type: ignore[method-assign]
    try:
        yield
    finally:
        Hydra.get_mode = original  # type: ignore[method-assign]


class CachedFiles(ConfigRepository):
    """Parses each file of conf/ and of Hydra's package once per process.

    A composition modifies the nodes it gets, so it gets copies: unpickled, in a fifth of the time of a deepcopy.
    """

    parsed: ClassVar[dict[tuple[str | int, ...], bytes]] = {}

    def load_config(self, config_path: str) -> ConfigResult | None:
        source = self._find_object_source(config_path=config_path, object_type=ObjectType.CONFIG)
        key: tuple[str | int, ...]
        if source is not None and source.scheme() == "file":
            file = os.path.join(source.path, f"{config_path.removesuffix('.yaml')}.yaml")
            stat = os.stat(file)
            key = (os.path.realpath(file), config_path, source.provider, stat.st_ino, stat.st_size, stat.st_mtime_ns)
        elif source is not None and source.scheme() == "pkg" and source.path.split(".")[0] == "hydra":
            key = (source.path, config_path, source.provider)
        else:  # Hydra's store: another recipe may have taken the name since
            return super().load_config(config_path)
        if key not in self.parsed:
            with quick_yaml():
                self.parsed[key] = pickle.dumps(super().load_config(config_path))
        loaded: ConfigResult | None = pickle.loads(self.parsed[key])  # what this process has pickled itself
        return loaded

    def __deepcopy__(self, memo: dict[int, Any]) -> CachedFiles:
        """Copy for a composition, which may use other sources; Hydra would copy its whole store, with all recipes."""
        return copy.copy(self)


def choices_if_needed(overrides: Any, defaults: list[Any], self_added: bool) -> DictConfig:
    """Return the choices for defaults that refer to another group's choice; without such defaults, nothing."""
    if any(default.is_interpolation() for default in defaults):
        return all_choices(overrides, defaults, self_added)
    return OmegaConf.create()


all_choices = defaults_list._create_interpolation_map


@contextmanager
def cached_files() -> Iterator[None]:
    """Compose in half of Hydra's time: files are parsed once per process, by libyaml.

    Hydra also builds a node with all choices for each file it reads, although only interpolations in defaults use it.
    """
    config_loader_impl.ConfigRepository = CachedFiles  # type: ignore[attr-defined]
    defaults_list._create_interpolation_map = choices_if_needed  # type: ignore[assignment]
    try:
        yield
    finally:
        config_loader_impl.ConfigRepository = ConfigRepository  # type: ignore[attr-defined]
        defaults_list._create_interpolation_map = all_choices


def cache_jobs(loader: Any) -> None:
    """Make a Hydra config loader compose each job of a sweep once and return copies."""
    compose = loader.load_sweep_config
    kept: dict[tuple[str, ...], DictConfig] = {}

    def once(master_config: DictConfig, sweep_overrides: list[str]) -> DictConfig:
        overrides = tuple(sweep_overrides)
        if overrides not in kept:
            kept[overrides] = compose(master_config, sweep_overrides)
        config = copy.deepcopy(kept[overrides])
        OmegaConf.copy_cache(from_config=master_config, to_config=config)  # ${now:} stays the first job's
        return config

    loader.load_sweep_config = once
