"""Recipes and run folders are untrusted: reading one is bounded, runs no code and sees no environment."""

from __future__ import annotations

import functools
import io
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from dtrain.config.build import reserved
from dtrain.config.files import (
    CODE,
    CONF,
    GROUPS,
    PARTIAL,
    RESERVED,
    SEVERAL,
    TARGET,
    flatten,
    option_of,
    options_of,
    read_yaml,
    sections,
)
from dtrain.errors import bad
from dtrain.util.regular_file import open_regular

MOST_BYTES = 2**20
MOST_VALUES = 2000  # aliases and references expanded; a full configuration has 200 values, and OmegaConf is slow
MOST_IN_A_RUN = 10 * MOST_VALUES  # a run's own config.yaml may contain long lists that the user typed
MOST_DEPTH = 16
LONGEST = 4096  # of one text: a number with that many digits still parses at once
GROWTH = 3 ** (1 / 3)  # growth per reference in the worst case, a chain where each value refers to three others
REFERENCE = re.compile(r"\$\{\.*\w[\w.\[\]-]*\}")  # a plain reference to a setting; any other ${…} may call a resolver
OPTION = re.compile(r"(?!.*\.\.)[\w-][\w.-]*(/[\w-][\w.-]*)*", re.ASCII)  # never a path out of its folder


class TooLarge(ValueError):
    """Larger than any configuration: reading it would take minutes, or all memory."""


# ---- bounds --------------------------------------------------------------------------------------------------


def read_text(path: Path, most: int = MOST_VALUES) -> str:
    """Read a small yaml file; ValueError: not yaml, or too large or too deep for a configuration."""
    with open_regular(path) as file:
        data = file.read(MOST_BYTES + 1)
    if len(data) > MOST_BYTES:
        raise TooLarge(f"it has more than {MOST_BYTES // 2**20} MiB")
    text = data.decode()
    check_size(text, most)
    return text


def check_size(text: str, most: int = MOST_VALUES) -> None:
    """Count values before anything is built: aliases and references can make a small file expand without limit."""
    import yaml

    anchors: dict[str, int] = {}
    open_nodes: list[tuple[str | None, int]] = []  # anchor, values counted before it
    count = references = 0
    for event in yaml.parse(text, getattr(yaml, "CSafeLoader", yaml.SafeLoader)):
        if isinstance(event, yaml.AliasEvent):
            count += anchors.get(event.anchor, most)  # unknown: an anchor that contains itself
        elif isinstance(event, yaml.ScalarEvent):
            count += 1
            references += event.value.count("${")
            if event.anchor:
                anchors[event.anchor] = 1
            if len(event.value) > LONGEST:
                raise TooLarge(f"line {event.start_mark.line + 1}: a text has more than {LONGEST} characters")
        elif isinstance(event, yaml.CollectionStartEvent):
            open_nodes.append((event.anchor, count))
            count += 1
            if len(open_nodes) > MOST_DEPTH:
                raise TooLarge(f"line {event.start_mark.line + 1}: it is nested more than {MOST_DEPTH} deep")
        elif isinstance(event, yaml.CollectionEndEvent):
            anchor, before = open_nodes.pop()
            if anchor:
                anchors[anchor] = count - before
        if count > most or count * GROWTH ** min(references, 100) > 10 * most:
            raise TooLarge(f"it has, or expands to, more than {most} values")


@contextmanager
def quick_yaml() -> Iterator[None]:
    """Make OmegaConf use libyaml: it subclasses yaml.SafeLoader, and the C version is ten times as fast."""
    import yaml

    slow = yaml.SafeLoader
    yaml.SafeLoader = getattr(yaml, "CSafeLoader", slow)
    try:
        yield
    finally:
        yaml.SafeLoader = slow


def check_own(config: Mapping[str, Any]) -> None:
    """Reject, in the launcher, a configuration that its ranks would refuse to read."""
    flat = flatten(dict(config))
    sizes = {key: len(value) if isinstance(value, list) else 1 for key, value in flat.items()}
    for key, value in flat.items():
        texts = [item for item in (value if isinstance(value, list) else [value]) if isinstance(item, str)]
        if texts and max(map(len, texts)) > LONGEST:
            raise bad(key, "…", f"has a text of more than {LONGEST} characters", "put it into a file")
    if 2 * sum(sizes.values()) > MOST_IN_A_RUN:
        key = max(sizes, key=sizes.__getitem__)
        rule = f"has {sizes[key]} items, and a whole configuration may have {MOST_IN_A_RUN // 2}"
        raise bad(key, "…", rule, "a shorter list")


def read(path: Path, most: int = MOST_VALUES) -> Any:
    """Read a file as OmegaConf does, as plain values; references stay unresolved."""
    from omegaconf import OmegaConf

    text = read_text(path, most)
    with quick_yaml():
        return OmegaConf.to_container(OmegaConf.load(io.StringIO(text)))


# ---- code ----------------------------------------------------------------------------------------------------


def check_targets(config: Mapping[str, Any]) -> None:
    """Allow `_target_` and `_partial_` only at the top of a group, and only dtrain targets that conf/ has there.

    Whether a third-party module may be called is decided where its name is imported, from the typed `trust`.
    """
    spread = {name: section for key in config for name, section in sections(config, key).items()}
    for key, section in spread.items():
        own = str(key).partition(".")[0] in GROUPS and isinstance(section, dict)
        check_reserved({k: v for k, v in section.items() if k not in (TARGET, PARTIAL)} if own else section, str(key))
        if own and TARGET in section:
            check_target(key, section)
        elif own and PARTIAL in section and not isinstance(section[PARTIAL], bool):
            raise bad(f"{key}.{PARTIAL}", section[PARTIAL], "must be true or false", "leave it out")
        if RESERVED.fullmatch(str(key).rpartition(".")[2]):
            raise reserved(str(key), section)


def check_target(name: str, section: Mapping[str, Any]) -> None:
    target, partial = section[TARGET], section.get(PARTIAL, False)
    key, group = f"{name}.{TARGET}", name.partition(".")[0]
    if not isinstance(target, str) or not target:
        raise bad(key, target, "must name what to build", f"choose an option of conf/{group}/")
    if not isinstance(partial, bool):
        raise bad(f"{group}.{PARTIAL}", partial, "must be true or false", "leave it out")
    if target.partition(".")[0] != "dtrain":
        return
    option = option_of(group, target)
    if option is None:
        fix = f"leave out {key}"
        if group not in SEVERAL:
            fix += f"; {group} can be {', '.join(options_of(group))}, or your own MODULE.NAME"
        raise bad(key, target, f"is not what an option of {group} is made from", fix)
    if PARTIAL in section and partial != option.get(PARTIAL, False):
        rule = f"conf/{group}/ has {TARGET}: {target} {'without it' if partial else 'with true'}"
        raise bad(f"{group}.{PARTIAL}", str(partial).lower(), rule, "leave it out")


def check_reserved(node: Any, key: str) -> None:
    if isinstance(node, dict):
        for name, value in node.items():
            if RESERVED.fullmatch(str(name)):
                raise reserved(f"{key}.{name}", value)
            check_reserved(value, f"{key}.{name}")
    elif isinstance(node, (list, tuple)):
        for item in node:
            check_reserved(item, key)


# ---- the environment -----------------------------------------------------------------------------------------


def resolvers(node: Any, key: str = "") -> Iterable[tuple[str, str]]:
    """Yield (setting, text) for every text or key that contains more than plain text and plain references."""
    if isinstance(node, dict):
        for name, value in node.items():
            yield from resolvers(str(name), key)
            yield from resolvers(value, f"{key}.{name}" if key else str(name))
    elif isinstance(node, (list, tuple)):
        for item in node:
            yield from resolvers(item, key)
    elif isinstance(node, str) and "${" in REFERENCE.sub("", node):
        yield key, node


def check_file(path: Path, tree: dict[str, Any]) -> None:
    """Check a recipe or a run's configuration: no misplaced targets, and no resolver that conf/ does not use."""
    try:
        check_resolvers(tree)
        check_targets(tree)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None


def check_resolvers(tree: Any, typed: Iterable[str] = ()) -> None:
    overrides = list(typed)
    for key, text in resolvers(tree):
        asked = re.findall(r"\$\{[^}]*\}*", text)
        if not in_conf(text) and not all(any(part in word for word in overrides) for part in asked):
            rule = "only the command line may use resolvers (environment variables, files, …), not a file"
            raise bad(key, text, rule, f"write the value itself, or give it on the command line: {key}=…")


@functools.cache
def in_conf(text: str) -> bool:
    """Does conf/ itself contain this text, e.g. ${now:%H-%M-%S}?"""
    files = (path for path in sorted(CONF.rglob("*.yaml"), key=lambda p: p.parent != CONF))
    return any(
        text == found
        for path in files
        if text in path.read_text(encoding="utf-8")
        for _, found in resolvers(read_yaml(path))
    )


def resolved(cfg: Any, typed: Iterable[str]) -> dict[str, Any]:
    """Resolve a composed configuration to plain values. A resolver runs only if it was typed or if conf/ has it."""
    from omegaconf import OmegaConf

    mine = OmegaConf.masked_copy(cfg, [str(k) for k in cfg if k not in ("hydra", "recipe")])
    check_resolvers(OmegaConf.to_container(mine), typed)
    values: Any = OmegaConf.to_container(mine, resolve=True)
    check_resolved(values, typed)
    return {str(key): value for key, value in values.items()}


def check_resolved(values: Any, typed: Iterable[str]) -> None:
    """Reject values that still contain ${…}: assembled from harmless parts, Hydra would resolve them later."""
    given = {word.partition("=")[0].lstrip("+") for word in typed}
    for key, value in flatten(values).items():
        is_code = key.partition(".")[2] in CODE  # shell code contains ${…}
        if "${" in f"{key} {value}" and key not in given and not is_code:
            raise bad(
                key,
                value,
                "expands to a resolver, which only the command line may use",
                f"give {key}=… on the command line",
            )
