"""What each setting means, its type and its default, read from conf/ and from the constructors of what it configures.

The meaning of a setting is the comment beside it, or the comment lines directly above it. `dtrain explain` shows it,
and docs/generate.py makes docs/configuration.md of it. Types and values are in Markdown: `stop`, `skip`.
"""

from __future__ import annotations

import ast
import functools
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dtrain.config import schema
from dtrain.config.files import CONF, flatten, options_of, read_yaml, section

GROUP_MEANINGS = "# What each group decides:"  # the heading of a comment in conf/config.yaml


@dataclass(frozen=True)
class Comments:
    header: str  # the comment at the top of the file
    settings: dict[str, str]  # dotted name -> the comment beside it, or directly above it


@functools.cache
def comments(path: Path) -> Comments:
    """The comments of a file of conf/, which uses block style: one `key: value # comment` a line."""
    header: list[str] = []
    above: list[str] = []
    found: dict[str, str] = {}
    parents: list[tuple[int, str]] = []
    in_header = True
    for line in path.read_text(encoding="utf-8").splitlines():
        text = line.strip()
        if text.startswith("# @package"):  # for Hydra
            continue
        if text.startswith("#"):
            (header if in_header else above).append(text.lstrip("#").strip())
            continue
        in_header = False
        match = re.match(r"( *)([\w.-]+):(?=\s|$)(.*)$", line)
        if match is None:
            above = []
            continue
        indent, key, rest = len(match[1]), match[2], match[3]
        parents = [(depth, name) for depth, name in parents if depth < indent]
        name = ".".join([*(name for _, name in parents), key])
        beside = re.search(r"(?:^|\s)# ?(.*)$", re.sub(r"\"[^\"]*\"|'[^']*'", lambda m: "x" * len(m[0]), rest))
        note = rest[beside.start(1) :].strip() if beside else " ".join(above)
        if note:
            found[name] = note
        parents.append((indent, key))
        above = []
    return Comments(" ".join(header), found)


@dataclass(frozen=True)
class Setting:
    name: str  # dotted, without the group
    type: str
    default: str
    meaning: str  # empty: nobody has written it


def first_sentence(text: str) -> str:
    return re.split(r"(?<=[.!?])\s+(?=[A-Z`\d])", text.strip(), maxsplit=1)[0]


def description(group: str, option: str) -> str:
    """All of the comment at the top of an option's file."""
    return comments(CONF / group / f"{option}.yaml").header


@functools.cache
def base_of(group: str, option: str) -> str | None:
    """The option of the same group that this one changes."""
    own = read_yaml(CONF / group / f"{option}.yaml").get("defaults", [])
    return next((name for name in own if isinstance(name, str) and name != "_self_"), None)


def as_type(annotation: str) -> str:
    """A Python annotation in the words of a table."""
    literal = re.fullmatch(r"Literal\[(.*)\]( \| None)?", annotation)
    if literal:
        values = [as_value(value) for value in ast.literal_eval(f"[{literal[1]}]")]
        return ", ".join([*dict.fromkeys(values), *(["`null`"] if literal[2] else [])])
    parts = [part.strip() for part in re.split(r"\|(?![^\[]*\])", annotation)]
    names = {"None": "null", "str": "text", "int": "integer", "float": "number", "bool": "`true`, `false`"}
    shown = [as_type(part) if part.startswith("Literal[") else names.get(part, part) for part in parts]
    item = re.compile(r"(?:list|Sequence)\[(\w+)\]")
    shown = [item.sub(lambda m: f"list of {names.get(m[1], m[1])}", part) for part in shown]
    shown = ["mapping" if part.startswith("dict") else part for part in shown]
    return " or ".join(dict.fromkeys(shown))


def as_value(value: Any) -> str:
    """A value as it is typed on the command line."""
    if value == "???":
        return "required"
    if value is None:
        return "`null`"
    if isinstance(value, bool):
        return f"`{str(value).lower()}`"
    if isinstance(value, list):
        return f"`[{','.join(as_value(item).strip('`') for item in value)}]`"
    if isinstance(value, dict):
        return "`{}`" if not value else f"{len(value)} entries"
    if isinstance(value, float):
        return f"`{value:g}`"
    return f"`{value}`" if value != "" else "empty"


def plain_type(key: str, default: Any) -> str:
    """The type of a setting of conf/config.yaml, as schema.check_plain decides it."""
    if key in schema.CHOICES:
        return as_type(f"Literal[{', '.join(map(repr, schema.CHOICES[key]))}]")
    if key in schema.NULLABLE:
        return as_type(f"{schema.NULLABLE[key].__name__} | None")
    return as_type("list[str]" if isinstance(default, list) else type(default).__name__)


@functools.cache
def top_settings(file: str = "config.yaml") -> list[Setting]:
    """The settings of conf/config.yaml, or of conf/script.yaml."""
    path = CONF / file
    values = {key: value for key, value in read_yaml(path).items() if key not in ("defaults", "hydra")}
    notes = comments(path).settings
    return [
        Setting(key, plain_type(key, value), as_value(value), notes.get(key, ""))
        for key, value in flatten(values).items()
    ]


@functools.cache
def target_of(group: str, option: str) -> str:
    return str(section(group, option).get("_target_", ""))  # logger=none builds nothing


def chain(group: str, option: str) -> list[str]:
    """The option and those that it builds on."""
    base = base_of(group, option)
    return [option, *(chain(group, base) if base else [])]


def meaning(group: str, option: str, name: str) -> str:
    """The comment in the option's own file, in a file that it builds on, or in another option of the same group."""
    for file in reversed(chain(group, option)):  # the base says what a setting means; others comment on their value
        if text := comments(CONF / group / f"{file}.yaml").settings.get(name):
            return text
    target = target_of(group, option)
    others = sorted(options_of(group), key=lambda other: (target_of(group, other) != target, other))
    found = (comments(CONF / group / f"{other}.yaml").settings.get(name) for other in others)
    return next((text for text in found if text), "")


def leaves(settings: dict[str, Any]) -> dict[str, Any]:
    """Dotted names and values; the environment variables of a network profile are one value."""
    flat = flatten(settings) if settings else {}
    variables = {name for name in flat if name.startswith("fabric.env.")}
    return {name: value for name, value in flat.items() if name not in variables} | (
        {"fabric.env": settings["fabric"]["env"]} if variables else {}
    )


@functools.cache
def settings_of(group: str, option: str) -> list[Setting]:
    """Every setting that an option takes: those of its file, then those that only its constructor names."""
    whole = {key: value for key, value in section(group, option).items() if key not in ("_target_", "_partial_")}
    target = target_of(group, option)
    parameters = (schema.signature(target, group) if target else None) or {}
    found = []
    for name, value in leaves(whole).items():
        annotation = parameters[name][0] if name in parameters else ""
        kind = as_type(annotation) if annotation else "text or null" if value is None else as_type(type(value).__name__)
        found.append(Setting(name, kind, as_value(value), meaning(group, option, name)))
    if section(group, option).get("_partial_"):
        return found  # the loop gives the other arguments
    for name, (annotation, default) in parameters.items():
        if name not in whole:
            value = default if default is schema.REQUIRED else ast.literal_eval(str(default))
            found.append(Setting(name, as_type(annotation), as_value(value), meaning(group, option, name)))
    return found


@functools.cache
def group_meanings() -> dict[str, str]:
    """`# GROUP: what it decides` in the comment at the top of conf/config.yaml."""
    text = (CONF / "config.yaml").read_text(encoding="utf-8").partition(GROUP_MEANINGS)[2]
    return dict(re.findall(r"^#   (\w+): (.+)$", text, re.MULTILINE))
