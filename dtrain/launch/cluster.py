"""Build the cluster object of a configuration, also of a class of the user that is older than a setting of dtrain."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from dtrain.config.build import build
from dtrain.config.files import TARGET
from dtrain.config.schema import signature


def build_cluster(section: dict[str, Any], trust: Iterable[str]) -> Any:
    """Build it; a class of the user gets the settings that its constructor takes (config/schema.py checks the rest)."""
    target = section[TARGET]
    parameters = None if target.startswith("dtrain.") else signature(target, f"cluster.{TARGET}", trust)
    if parameters is not None:
        section = {key: value for key, value in section.items() if key == TARGET or key in parameters}
    return build(section, trust)
