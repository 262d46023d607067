"""Explain user errors: one message with a fix for each of Hydra's and OmegaConf's many exception types."""

from __future__ import annotations

import difflib
import re
from pathlib import Path

from hydra.errors import HydraException, MissingConfigException, OverrideParseException
from omegaconf.errors import OmegaConfBaseException

from dtrain.config.files import CONF, LOGGER, known_settings, options_of, read_yaml
from dtrain.config.files import GROUPS as GROUPS
from dtrain.errors import unknown
from dtrain.util import disk_space

MISTAKES = (HydraException, OmegaConfBaseException, ValueError, OSError)  # user errors: shown as one message with a fix


def explain(error: BaseException) -> str:
    """Return one clear message with a fix for a user error raised by Hydra, OmegaConf or dtrain."""
    text = str(error)
    in_list = re.search(rf"Could not load '({LOGGER}/[^']*)'", text)  # an option of several: Hydra lists no options
    if isinstance(error, MissingConfigException) and (error.options is not None or in_list):  # it is also an OSError
        path = in_list[1] if in_list else str(error.missing_cfg_file)
        group, _, option = path.rpartition("/") if path.startswith("hydra/") else path.partition("/")
        options = sorted({*(error.options or options_of(group)), *(["auto"] if group == "strategy" else [])})
        near = difflib.get_close_matches(option.lower(), options, 1, 0.4)
        fix = f"did you mean {group}={near[0]}? " if near else ""
        if path == f"{LOGGER}/prometheus":  # it asks the run, and is not sent anything
            fix = "cluster.metrics_port=9834, or `dtrain metrics serve`. "
        return f"{group}={option}: there is no such option\n  fix: {fix}{group} can be {', '.join(options)}"
    if isinstance(error, OSError) and error.errno in disk_space.FULL:
        return disk_space.explain(error, Path.cwd()).replace(". Fix: ", "\n  fix: ")
    if isinstance(error, OSError) and error.filename:
        return f"{error.filename}: {error.strerror}\n  fix: check the path and its permissions"
    if "  fix: " in text:  # dtrain's own message
        return text
    if isinstance(error, OverrideParseException):
        word = error.override
        return f"{word if word.strip() else repr(word)}: is not understood as key=value\n  fix: {probably_meant(word)}"
    there = re.search(r"An item is already at '([\w./@-]+)'", text)
    if there and "." in there[1]:
        return f"+{there[1]}: the setting is there already\n  fix: leave out the +, as in {there[1]}=VALUE"
    key = re.search(r"Could not (?:override|append to|delete from) config.*?'?([\w./@-]+)'?\."
                    r"|Could not override '([\w.@/-]+)'", text)  # fmt: skip
    if key and "HYDRA_FULL_ERROR" not in (key[2] or key[1]):
        name, known = key[2] or key[1], known_settings()
        if name not in known:
            return str(unknown(name, known))
        group, _, setting = name.partition(".")
        if group == LOGGER and "." in setting:
            option = setting.partition(".")[0]
            return f"{name}: {option} is not among the chosen loggers\n  fix: {group}={option}, or {group}=[…,{option}]"
        if not setting:
            choose = f", or {name}={' or '.join(options_of(name))}" if name in GROUPS else ""
            return f"{name}: is a section\n  fix: {name}.SETTING=value{choose}"
        having = [o for o in options_of(group) if setting in read_yaml(CONF / group / f"{o}.yaml")]
        return f"{name}: the chosen {group} has no such setting\n  fix: leave it out, or {group}={' or '.join(having)}"
    full_key = getattr(error, "full_key", None)
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    noise = ("See ", "Set the env", "full_key:", "object_type=", "reference_type=")
    lines = [line for line in lines if not line.startswith(noise)]
    multiple = re.match(r"Multiple values for ([\w/]+)\. To override a value use '(.*): (.*)'", text)
    ambiguous = re.match(r"Ambiguous value for argument '(.*)'", text)
    if multiple:
        group, override, option = multiple.groups()
        return f"{group}={option}: there is a {group} already\n  fix: in the file, `{override}: {option}`"
    if ambiguous:
        return f"{ambiguous[1]}: is more than one value\n  fix: give one, or -m for a sweep over them"
    what = (f"{full_key}: " if full_key else "") + (" ".join(lines[:2]) if lines else type(error).__name__)
    return f"{what}\n  fix: python launch.py --help shows every group and setting"


def probably_meant(word: str) -> str:
    """Guess the intended override for `fsdp`, `strategy:fsdp`, `train.steps = 5` or `run_dir=a=b`."""
    for group in GROUPS:
        if word in options_of(group):
            return f"{group}={word}"
    pair = re.fullmatch(r"\s*([A-Za-z_][\w.]*)\s*[=:/ ]\s*(.*?)\s*|\s*([A-Za-z_][\w.-]*)\s*", word)
    if pair is None:
        return "key=value"
    key, value = pair[1] or pair[3], (pair[2] or "").strip("=")
    if value.startswith("[") and value.endswith("]") and "=" in value:  # [--cpu-bind=none]
        items = ",".join(f'"{item.strip()}"' for item in value[1:-1].split(","))
        return f"'{key}=[{items}]'"
    simple = re.fullmatch(r"[\w./-]*", value, re.ASCII)
    return f"{key}={value or '…'}" if simple else f"'{key}=\"{value}\"'"
