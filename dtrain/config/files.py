"""The configuration files: where they are and how they are read.

Hydra composes once, in the launcher (dtrain/launch/app.py). Workers read `run_dir/config.yaml` with `load` and
create every object with `build`. Only `build` turns a name in a file into code.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dtrain.config.redaction import SECRET as SECRET
from dtrain.config.redaction import redact as redact

# every character that breaks a line in a shell, a terminal or str.splitlines
CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029]")
# cluster settings that define what is executed: only typed or in conf/, never from a recipe or a run folder
CODE = (
    "setup", "python", "srun", "sbatch", "container_image", "container_mounts",
    "image", "pod", "env", "secret_env", "service_account", "volumes", "context",
)  # fmt: skip


def _folder(name: str) -> Path:
    """Locate conf/ or recipes/: inside the package in a wheel, at the top level in a checkout."""
    package = Path(__file__).resolve().parent.parent
    return package / name if (package / name).is_dir() else package.parent / name


CONF = _folder("conf")
RECIPES = _folder("recipes")


def read_yaml(path: Path) -> Any:
    """Read a yaml file as plain values only; uses the C parser if available, which is ten times as fast."""
    import yaml

    return yaml.load(path.read_bytes(), yaml_loader())


@functools.cache
def yaml_loader() -> Any:
    """Return PyYAML's safe loader, but read 1e-5 as a number, like OmegaConf; YAML 1.1 requires 1.0e-5."""
    import yaml

    class Loader(getattr(yaml, "CSafeLoader", yaml.SafeLoader)):  # type: ignore[misc]
        """A subclass, because a resolver added to PyYAML's own class would affect every user of it."""

    number = re.compile(r"[-+]?\d+(\.\d*)?[eE][-+]?\d+$")
    Loader.add_implicit_resolver("tag:yaml.org,2002:float", number, list("-+0123456789"))
    return Loader


@functools.cache
def section(group: str, name: str) -> dict[str, Any]:
    """Merge conf/GROUP/NAME.yaml over its base files in the group, without composing a whole configuration.

    Cached: do not modify the result.
    """
    own: dict[str, Any] = read_yaml(CONF / group / f"{name}.yaml")
    bases = [base for base in own.get("defaults", []) if isinstance(base, str) and base != "_self_"]
    whole: dict[str, Any] = {}
    for part in (*(section(group, base) for base in bases), {k: v for k, v in own.items() if k != "defaults"}):
        whole = over(whole, part)
    return whole


def over(below: Any, above: Any) -> Any:
    """Merge nested sections key by key; for any other value, `above` replaces `below`."""
    if not isinstance(below, dict) or not isinstance(above, dict):
        return above
    return below | {key: over(below.get(key), value) for key, value in above.items()}


def flatten(node: Any, prefix: str = "") -> dict[str, Any]:
    """{"a": {"b": 1}} → {"a.b": 1}. Lists are values, not branches."""
    if not isinstance(node, dict) or (not node and prefix):
        return {prefix: node}
    flat: dict[str, Any] = {}
    for key, value in node.items():
        flat |= flatten(value, f"{prefix}.{key}" if prefix else str(key))
    return flat


# ---- from a name in a file to code ---------------------------------------------------------------------------

TARGET, PARTIAL = "_target_", "_partial_"
RESERVED = re.compile(r"_\w+_")  # _target_ and similar keys of hydra.utils.instantiate; reserved
GROUPS = sorted(path.name for path in CONF.iterdir() if path.is_dir())
# A tracker's server gets the credentials of the environment: its address must be typed, never come from a run folder.
ADDRESSES = ("uri", "server_url")
LOGGER, HOOKS = "logger", "hooks"
SEVERAL = (LOGGER, HOOKS)  # groups of which several options may be chosen: their section has a section for each


def sections(config: Mapping[str, Any], group: str) -> dict[str, Any]:
    """Return the sections of a group by their dotted names: one, or one for each chosen logger or hook."""
    section = config[group]
    if group not in SEVERAL or not isinstance(section, Mapping):
        return {group: section}
    return {f"{group}.{name}": value for name, value in section.items()}


@functools.cache
def option_of(group: str, target: str) -> dict[str, Any] | None:
    """Return the first option of conf/GROUP/ with this target. Cached: do not modify the result."""
    for path, text in files(group):
        if target.encode() in text:  # faster than parsing every file
            option: dict[str, Any] = read_yaml(path)
            if option.get(TARGET) == target:
                return option
    return None


@functools.cache
def files(group: str) -> list[tuple[Path, bytes]]:
    """Return the option files of a group, unparsed."""
    return [(path, path.read_bytes()) for path in sorted((CONF / group).glob("*.yaml"))]


def targets(group: str) -> list[str]:
    """Return every target that conf/GROUP/ names."""
    found = {read_yaml(path).get(TARGET) for path in (CONF / group).glob("*.yaml")}
    return sorted(found - {None})


# ---- the file ------------------------------------------------------------------------------------------------


def setting_prefix(group: str, option: str) -> str:
    """Return what the names of an option's settings begin with: logger.mlflow, and strategy."""
    return f"{group}.{option}" if group in SEVERAL else group


@functools.cache
def default_options() -> dict[str, str]:
    entries = read_yaml(CONF / "config.yaml")["defaults"]
    chosen: dict[str, str] = {}
    for entry in entries:
        if isinstance(entry, dict):
            chosen |= {group: str(option) for group, option in entry.items() if group in GROUPS}
    return chosen


def default_of(key: str) -> Any:
    """Return the default of a setting, for a group that of its default option; None: it has none, or is not known."""
    group, _, name = key.partition(".")
    if group in SEVERAL:
        return None
    if group in GROUPS:
        return section(group, default_options()[group]).get(name)
    return flatten(read_yaml(CONF / "config.yaml")).get(key)


def options_of(group: str) -> list[str]:
    return sorted(path.stem for path in (CONF / group).glob("*.yaml"))


def is_script(config: Mapping[str, Any]) -> bool:
    """Is it a run of the user's own program, and not of dtrain's training loop?"""
    return "script" in config


def main_file(config: Mapping[str, Any]) -> Path:
    """Return the file that has the plain settings of this configuration."""
    return CONF / ("script.yaml" if is_script(config) else "config.yaml")


def known_settings() -> list[str]:
    """Return every default setting and every group, for did-you-mean suggestions."""
    names = {*GROUPS, "script", "script_args"}  # the last two: short forms (launch/script_arguments.py)
    for path in CONF.glob("*.yaml"):
        names |= {k for k in flatten(read_yaml(path)) if not k.startswith(("defaults", "hydra"))}
    for path in CONF.glob("*/*.yaml"):
        prefix = setting_prefix(path.parent.name, path.stem)
        names |= {f"{prefix}.{k!s}" for k in read_yaml(path) if not str(k).startswith(("_", "defaults"))}
    return sorted(names)
