"""Composed questions for the planner's tests, each composed once, and layouts put back into a configuration."""

import copy
import functools
from typing import Any

import yaml

from dtrain.commands.plan.request import Question, compose
from dtrain.plan.sections import strategy_section


@functools.cache
def _composed(*words: str) -> Question:
    return compose(list(words))


def question(*words: str) -> Question:
    """What `dtrain plan WORDS` composes; a copy, as tests change it."""
    return copy.deepcopy(_composed(*words))


def applied(words: list[str], config: dict[str, Any]) -> dict[str, Any]:
    """The configuration that the launcher would have after these overrides."""
    config = copy.deepcopy(config)
    for word in words:
        key, _, text = word.partition("=")
        if key == "strategy":
            config["strategy"], config["choices"]["strategy"] = strategy_section(text), text
            continue
        *path, leaf = key.split(".")
        node = functools.reduce(lambda node, name: node[name], path, config)
        assert leaf in node, f"{word}: there is no such setting"
        node[leaf] = yaml.safe_load(text)
    return config
