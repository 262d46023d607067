"""Turn `script=FILE` and `script_args=…` into settings, and choose conf/script.yaml for a launch of a program."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

from hydra.core.config_store import ConfigStore

from dtrain.config.files import CONF, read_yaml
from dtrain.config.hydra_errors import GROUPS
from dtrain.errors import bad
from dtrain.launch.quoting import quote, quoted_list


def script_overrides(argv: list[str]) -> list[str]:
    """Turn `script=FILE` and `script_args=…` into the settings that they stand for, and name the run after the program.

    Arguments stay texts, as typed: Hydra would read 1e-3 as a number, and True as a boolean.
    """
    is_sweep = bool({"-m", "--multirun"} & set(argv))
    given = dict(a.split("=", 1) for a in argv if "=" in a and not a.startswith("-"))
    overrides = []
    for word in argv:
        name, _, value = word.partition("=")
        name = name.lstrip("+")
        if name in ("script", "script.path"):
            if not value or value == "null":
                raise bad("script", value, "must name a program", "script=train.py")
            typed = [part.strip("'\"") for part in (value.split(",") if is_sweep else [value])]
            paths = [Path(part).expanduser().absolute() for part in typed]
            overrides.append(f"script.path={','.join(map(quote, paths))}")
            is_named = "name" in given or "resume" in given or len(paths) > 1
            overrides += [] if is_named else [f"name={quote(paths[0].stem)}"]
        elif name in ("script_args", "script.args"):
            overrides.append(f"script.args={','.join(map(quoted_list, points(value, is_sweep)))}")
        else:
            overrides.append(word)
    return overrides


def points(value: str, is_sweep: bool) -> list[list[str]]:
    """Read the arguments of a program: [--lr,1e-3] or `--lr 1e-3`; in a sweep, several of either, with commas."""
    if re.fullmatch(r"(\[[^\[\]]*\],?)+", value):
        lists = re.findall(r"\[([^\[\]]*)\]", value)
        return [[item.strip().strip("'\"") for item in text.split(",") if item.strip()] for text in lists]
    try:
        return [shlex.split(text) for text in (value.split(",") if is_sweep else [value])]
    except ValueError as error:
        raise bad(
            "script_args", value, f"cannot be split into arguments ({error})", "script_args=[--lr,1e-3]"
        ) from None


def check_groups(argv: list[str]) -> None:
    """Reject the groups that only dtrain's training loop has."""
    groups = [next(iter(entry)) for entry in read_yaml(CONF / "script.yaml")["defaults"] if isinstance(entry, dict)]
    for word in argv:
        group = word.lstrip("+~").partition("=")[0].partition(".")[0]
        if (group in GROUPS and group not in groups) or group in ("train", "checkpoint", "guard", "lora"):
            rule = "is a setting of dtrain's own training loop, and script= runs your program instead"
            raise ValueError(f"{word}: {rule}\n  fix: leave it out, or give it to the program: script_args=[…]")


def main_config(argv: list[str]) -> str:
    """Return which file of conf/ these arguments are composed with: that of programs, or that of the training loop."""
    recipe = dict(a.split("=", 1) for a in argv if "=" in a).get("recipe", "")
    stored = ConfigStore.instance().repo.get("recipe", {})
    for folder in recipe.split("/")[:-1]:
        stored = stored.get(folder, {})
    chosen = stored.get(f"{recipe.rpartition('/')[2]}.yaml")
    has_section = chosen is not None and "script" in chosen.node
    if not has_section and not any(re.match(r"\+*script\.", a) for a in argv):
        return "config"
    check_groups(argv)
    return "script"
