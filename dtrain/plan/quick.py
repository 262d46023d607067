"""conf/ composed without Hydra, which takes most of the time of a plan: 50 ms instead of 400.

For groups and plain values, which is what people type. All else is Hydra's, and so is every mistake: it has the words
for it. A test composes both ways.
"""

from __future__ import annotations

import copy
import re
from datetime import datetime
from typing import Any

from dtrain.config import CONF, read_yaml, section
from dtrain.explain import GROUPS, options_of
from dtrain.schema import check_keys_and_types

PLAIN = re.compile(r"-?(0|[1-9]\d*)(\.\d+)?(e-?\d+)?|true|false|null|[A-Za-z][\w-]*", re.ASCII)
NOT_PLAIN = re.compile(r"true|false|null|inf|nan", re.IGNORECASE)  # Hydra's own, in any case
OVERRIDE = re.compile(r"override /(\w+)@_global_\.\1")
REFERENCE = re.compile(r"\$\{(?:(\w+):)?([^${}]+)\}")


class Unusual(Exception):
    """Words, or files of conf/, that only Hydra understands."""


def composed(words: list[str]) -> dict[str, Any] | None:
    """The configuration and its choices, with keys and types checked; None: ask Hydra."""
    try:
        config, choices = compose(words)
    except Unusual:
        return None
    check_keys_and_types(config)
    return {**config, "choices": {group: choices.get(group) for group in (*GROUPS, "recipe")}}


def compose(words: list[str]) -> tuple[dict[str, Any], dict[str, str]]:
    given = dict(word.split("=", 1) for word in words if "=" in word)
    if len(given) < len(words) or "resume" in given:
        raise Unusual("twice the same, or no setting; or a run's own configuration")
    base = read_yaml(CONF / "config.yaml")
    defaults = {g: option for entry in base["defaults"] if isinstance(entry, dict) for g, option in entry.items()}
    typed = {group: option for group, option in given.items() if group in GROUPS}
    for group, option in typed.items():
        if option not in options_of(group):
            raise Unusual(f"{group}={option}")
    choices = choose({group: defaults[group] for group in GROUPS}, typed)
    config = {key: value for key, value in base.items() if key not in ("defaults", "hydra")}
    config = copy.deepcopy(config | {group: section(group, option) for group, option in choices.items()})
    for key, text in given.items():
        if key not in GROUPS:
            put(config, key, value_of(text))
    return resolved(config, config, choices), choices


def choose(defaults: dict[str, str], typed: dict[str, str]) -> dict[str, str]:
    """The option of each group: as typed, else as an option of another group asks for, else the default."""
    choices = defaults | typed
    for _ in choices:  # an option that was asked for may ask, too
        asked: dict[str, str] = {}
        for group, option in choices.items():
            for other, wanted in overrides(group, option):
                if asked.setdefault(other, wanted) != wanted:
                    raise Unusual(f"two options ask for another {other}")
        found = defaults | asked | typed
        if found == choices:
            return choices
        choices = found
    raise Unusual("options that ask for each other")


def overrides(group: str, option: str) -> list[tuple[str, str]]:
    """(other group, its option) that an option asks for, with the files that it builds on."""
    found: list[tuple[str, str]] = []
    for entry in read_yaml(CONF / group / f"{option}.yaml").get("defaults", []):
        if isinstance(entry, str):
            found += overrides(group, entry) if entry != "_self_" else []
            continue
        for key, wanted in entry.items():
            other = OVERRIDE.fullmatch(key)
            if other is None:
                raise Unusual(key)
            found.append((other[1], wanted))
    return found


def value_of(text: str) -> Any:
    """A number, a word, true, false or null, as Hydra takes them."""
    known: dict[str, Any] = {"true": True, "false": False, "null": None}
    if text in known:
        return known[text]
    if not PLAIN.fullmatch(text) or NOT_PLAIN.fullmatch(text):
        raise Unusual(text)
    if text[0].isalpha():
        return text
    return float(text) if re.search(r"[.e]", text) else int(text)


def put(config: dict[str, Any], key: str, value: Any) -> None:
    *parents, name = key.split(".")
    place: Any = config
    for parent in parents:
        place = place.get(parent) if isinstance(place, dict) else None
    if not isinstance(place, dict) or name not in place or isinstance(place[name], dict | list):
        raise Unusual(key)
    place[name] = value


def resolved(node: Any, config: dict[str, Any], choices: dict[str, str]) -> Any:
    """With every ${…} replaced: another setting (by itself: of its type), the choice of a group, or the time."""
    if isinstance(node, dict):
        return {key: resolved(value, config, choices) for key, value in node.items()}
    if isinstance(node, list):
        return [resolved(value, config, choices) for value in node]
    if not isinstance(node, str) or "${" not in node:
        return node

    def meant(match: re.Match[str]) -> Any:
        kind, name = match.groups()
        if kind == "now":
            return datetime.now().strftime(name)
        value: Any = config
        if kind == "hydra":
            value, name = choices, name.removeprefix("runtime.choices.")
        elif kind:
            raise Unusual(node)
        for key in name.split("."):
            if not isinstance(value, dict) or key not in value:
                raise Unusual(name)
            value = value[key]
        return resolved(value, config, choices)

    def as_text(match: re.Match[str]) -> str:
        value = meant(match)
        if not isinstance(value, str):
            raise Unusual(node)
        return value

    alone = REFERENCE.fullmatch(node)
    return meant(alone) if alone else REFERENCE.sub(as_text, node)
