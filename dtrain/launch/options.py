"""Options that have no file in conf/: store them for Hydra, and explain what cannot be an option of a group."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from hydra.core.config_store import ConfigStore
from omegaconf import OmegaConf

from dtrain.config.files import SEVERAL, options_of
from dtrain.config.meant_option import called
from dtrain.errors import bad, foreign_option

AUTO = "auto"  # strategy=auto: the planner chooses (dtrain/launch/auto.py)
# Placeholder that Hydra composes until the planner has chosen. It has all degrees, so that strategy.tp=2 is valid.
STAND_IN = {"_target_": "dtrain.strategies.pipeline.Pipeline", "pp": -1, "dp": -1, "tp": -1, "cp": 1, "cp_kind": "ring"}

# What a number in the place of an option is meant as: optim=1e-3.
NUMBERS = {"optim": "optim.lr", "schedule": "schedule.warmup_steps", "cluster": "cluster.processes"}


def store_option(group: str, name: str, section: dict[str, Any], package: str | None = None) -> None:
    ConfigStore.instance().store(group=group, name=name, node=OmegaConf.create(section), package=package)


def named(value: str) -> list[str]:
    """Return the options in a value: one, those of a sweep (a,b), or several loggers or hooks ([a,b])."""
    return value.strip("[]").split(",")


def no_option(group: str, value: str) -> ValueError:
    """Explain what cannot be the name of an option: nothing, null, a list, a path, a file, a call."""
    if fix := called(group, value):
        return bad(group, value, "is not understood as key=value", fix)
    options = sorted({*options_of(group), *([AUTO] if group == "strategy" else [])})
    can, stem = f"{group} can be {', '.join(options)}", Path(value).stem
    is_listed = bool(re.search(r"[\[\]]", value))
    names = [name for part in named(value) if (name := part.strip(" '\""))] if is_listed else []
    if value in ("", "null") or (is_listed and not names):
        rule = "cannot be null" if value == "null" else "has no value"
        return bad(group, value, rule, f"leave out {group}=; {can}")
    is_several = group in SEVERAL
    if names and (is_several or len(names) == 1):  # a list that is spelled wrong, or that the group does not take
        rule = "is not a list: [ and ] go around names with commas between them" if is_several else "takes no list"
        return bad(group, value, rule, f"'{group}=[{','.join(names)}]'" if is_several else f"{group}={names[0]}; {can}")
    if names:
        fix = f"{group}={names[0]}, or -m {group}={','.join(names)}; {can}"
        return bad(group, value, "is more than one value", fix)
    if re.search(r"\.ya?ml$", value) and Path(value).is_file() and stem not in options:
        return bad(
            group, value, "is a file of settings, not an option", f"recipe={value if '/' in value else f'./{value}'}"
        )
    meant = f"{group}={stem}" if stem in options else foreign_option(group, stem)
    near = f"{meant}; " if meant else ""
    if "/" in value:
        return bad(group, value, "is a path, not the name of an option", f"{near}{can}")
    return bad(group, value, "names an option without .yaml", f"{near}{can}")


def no_such_option(group: str, value: str) -> ValueError:
    """Explain a number, true or false in the place of an option: precision=16 is fp16 or bf16."""
    options = sorted({*options_of(group), *([AUTO] if group == "strategy" else [])})
    # strategy=3 is ZeRO's third stage, not 3d
    near = [] if group == "strategy" else [option for option in options if value in re.findall(r"\d+", option)]
    near = [option for option in near if option.partition("-")[0] not in near or "-" not in option]  # not bf16-pure
    near = sorted(near, key=lambda option: not option.startswith("fp"))  # elsewhere 16 is fp16
    same, is_number = foreign_option(group, value), re.fullmatch(r"[\d._e+-]+", value)
    fix = f"{group}={' or '.join(near)}; " if near else f"{same}; " if same else ""
    if not fix and is_number and (setting := NUMBERS.get(group)):
        fix = f"{setting}={value}; "
    return bad(group, value, "there is no such option", f"{fix}{group} can be {', '.join(options)}")
