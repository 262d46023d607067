"""Explain user errors: one message with a fix for each of Hydra's and OmegaConf's many exception types."""

from __future__ import annotations

import difflib
import re
from collections.abc import Sequence
from pathlib import Path

from hydra.errors import HydraException, MissingConfigException, OverrideParseException
from omegaconf.errors import OmegaConfBaseException

from dtrain.config.files import (
    CONF,
    GROUPS,
    LOGGER,
    RECIPES,
    SECRET,
    SEVERAL,
    default_of,
    default_options,
    known_settings,
    options_of,
    read_yaml,
)
from dtrain.config.meant_option import OWN, called, meant_option
from dtrain.config.unknown_settings import accepted, unknown_setting
from dtrain.util import disk_space

MISTAKES = (HydraException, OmegaConfBaseException, ValueError, OSError)  # user errors: shown as one message with a fix


def explain(error: BaseException, argv: Sequence[str] = ()) -> str:
    """Return one clear message with a fix for a user error raised by Hydra, OmegaConf or dtrain. argv: as typed."""
    text = explained(error, argv)
    renamed = re.fullmatch(r"((\w+)=.* has no \w+\n  fix: )did you mean (\2=[\w.]+)\?", text)
    if renamed and any(word.startswith("resume=") for word in argv):  # of a class that the run has
        typed = next((word.partition("=")[2].strip("[]") for word in argv if word.startswith("resume_allow=")), "")
        text = f"{renamed[1]}{renamed[3]} 'resume_allow=[{','.join(filter(None, (typed, renamed[2])))}]'"
    for key in {word.partition("=")[0] for word in argv if re.match(r"\w[\w.]*=", word)}:
        text = text.replace(f"++{key}", key)  # added by the launcher, for settings that conf/ does not have
    return text


def explained(error: BaseException, argv: Sequence[str]) -> str:
    """Return the message of the first case that the error is one of."""
    text = str(error)
    return (
        of_missing_option(error, text)
        or of_operating_system(error)
        or (text if "  fix: " in text else "")  # dtrain's own message
        or of_syntax(error, argv)
        or of_plus_or_tilde(text, argv)
        or of_config_flag(text, argv)
        or of_setting(text, argv)
        or of_two_options(text)
        or of_two_values(text)
        or of_any_other(error, text)
    )


def of_missing_option(error: BaseException, text: str) -> str:
    """Explain model=nosuch: Hydra does not list what there is of several options."""
    in_list = re.search(rf"Could not load '(({'|'.join(SEVERAL)})/[^']*)'", text)
    if not isinstance(error, MissingConfigException) or (error.options is None and not in_list):
        return ""
    path = in_list[1] if in_list else str(error.missing_cfg_file)
    group, _, option = path.rpartition("/") if path.startswith("hydra/") else path.partition("/")
    found = [o for o in error.options or options_of(group) if not OWN.fullmatch(o)]  # not those typed before
    options = sorted({*found, *(["auto"] if group == "strategy" else [])})
    if path == f"{LOGGER}/prometheus":  # it asks the run, and is not sent anything
        fix = "cluster.metrics_port=9834, or `dtrain metrics serve`. "
    else:
        fix = meant_option(group, option, options)
    return f"{group}={option}: there is no such option\n  fix: {fix}{group} can be {', '.join(options)}"


def of_operating_system(error: BaseException) -> str:
    """Explain a full disk, and a file that cannot be read or written."""
    if not isinstance(error, OSError):
        return ""
    if error.errno in disk_space.FULL:
        return disk_space.explain(error, Path.cwd()).replace(". Fix: ", "\n  fix: ")
    return f"{error.filename}: {error.strerror}\n  fix: check the path and its permissions" if error.filename else ""


def of_syntax(error: BaseException, argv: Sequence[str]) -> str:
    """Explain a word that Hydra cannot parse."""
    if not isinstance(error, OverrideParseException):
        return ""
    word = error.override.removeprefix("++") if error.override not in argv else error.override
    shown = word if word.strip() else repr(word)
    name = re.sub(r"\.ya?ml$", "", word)
    if re.fullmatch(r"[\w-][\w./-]*", name) and not Path(word).is_file() and (RECIPES / f"{name}.yaml").is_file():
        return f"{shown}: is not understood as key=value\n  fix: recipe={name}"
    if re.search(r"\.ya?ml$", word) and not re.search(r"[\s=:]", word) and not Path(word).is_file():
        return f"{shown}: there is no such file\n  fix: recipe=FILE.yaml; dtrain recipes ls shows the built-in ones"
    return f"{shown}: is not understood as key=value\n  fix: {probably_meant(word, argv)}"


def of_plus_or_tilde(text: str, argv: Sequence[str]) -> str:
    """Explain +KEY=VALUE of a setting that is there, and ~KEY of one that is not."""
    there = re.search(r"An item is already at '([\w./@-]+)'", text)
    if there and "." in there[1]:
        plain = next((word[1:] for word in argv if word.startswith(f"+{there[1]}=")), f"{there[1]}=VALUE")
        return f"+{there[1]}: the setting is there already\n  fix: {plain}   (without the +)"
    deleted = re.search(r"Could not delete from config\. '([\w.@/-]+)' does not exist", text)
    if deleted and "." in deleted[1]:
        return f"~{deleted[1]}: there is nothing to take away\n  fix: leave out ~{deleted[1]}"
    return ""


def of_config_flag(text: str, argv: Sequence[str]) -> str:
    """Explain Hydra's --config-name and --config-path, with which dtrain's own conf/ would be another one."""
    found = re.search(r"Cannot find primary config '(.*?)'|Primary config module|Additional config directory", text)
    if not found:
        return ""
    pairs = [word.partition("=") for word in argv]
    flags = {word: value or (argv[i + 1] if i + 1 < len(argv) else "") for i, (word, _, value) in enumerate(pairs)}
    names = {"name": ("--config-name", "-cn"), "path": ("--config-path", "-cp", "--config-dir", "-cd")}
    typed = {kind: next((w for w in flags if w in words), "") for kind, words in names.items()}
    flag = typed["name"] or typed["path"] or "--config-name"
    name = found[1] or flags.get(typed["name"], "")
    places = [Path(flags.get(typed["path"], "."), name), Path(name)] if name else []
    file = next((path for place in places for path in (place, Path(f"{place}.yaml")) if path.is_file()), None)
    stem = name.removesuffix(".yaml")
    fix = f"recipe={stem}" if (RECIPES / f"{stem}.yaml").is_file() else "recipe=FILE.yaml, a file of settings"
    fix = f"recipe={file if '/' in str(file) else f'./{file}'}" if file else fix
    rule = "dtrain has its own main configuration; a file of settings is a recipe"
    return f"{flag}={flags.get(flag, name)}: {rule}\n  fix: {fix}"


def of_setting(text: str, argv: Sequence[str]) -> str:
    """Explain a setting that there is not, or not with the chosen options."""
    key = re.search(r"Could not (?:override|append to|delete from) config.*?'?([\w./@-]+)'?\."
                    r"|Could not override '([\w.@/-]+)'", text)  # fmt: skip
    if not key or "HYDRA_FULL_ERROR" in (key[2] or key[1]):
        return ""
    name, known = key[2] or key[1], known_settings()
    if name in known:
        return of_known_setting(name, argv)
    group, _, option = name.partition(".")
    if any(setting.startswith(f"{name}.") for setting in known):
        fix = f"{name}.SETTING=VALUE"
        fix = f"{group}={option}, or {fix}" if group in SEVERAL and option in options_of(group) else fix
        return f"{as_typed(name, argv)}: is a section\n  fix: {fix}   (dtrain explain {name})"
    if absent := not_chosen(name):
        return absent
    typed = re.search(r"^To append to your config use \+[^=\n]*=(.*)$", text, re.MULTILINE)
    value = typed[1].strip("'\"") if typed and re.fullmatch(r"'[\w.+/-]*'|\"[\w.+/-]*\"", typed[1]) else ""
    return unknown_setting(name, value or (typed[1] if typed else ""), argv)


def of_known_setting(name: str, argv: Sequence[str]) -> str:
    """Explain a setting that other options of its group have, or the name of a whole section."""
    group, _, setting = name.partition(".")
    if group in SEVERAL and "." in setting:
        option = setting.partition(".")[0]
        rule = f"{option} is not among the chosen {group.rstrip('s')}s"
        return f"{name}: {rule}\n  fix: {group}={option}, or {group}=[…,{option}]"
    if not setting:
        fix = f"{name}.SETTING=VALUE"
        if name in GROUPS:
            option = default_options()[name]
            fix = f"{name}={option}, or {name}.SETTING=VALUE; {name} can be {', '.join(options_of(name))}"
        return f"{as_typed(name, argv)}: is a section\n  fix: {fix}"
    files = {option: read_yaml(CONF / group / f"{option}.yaml") for option in options_of(group)}
    having = sorted((o for o in files if setting in files[o]), key=lambda o: len(files[o]))
    having = [o for o in having if o != "3d"] or having  # which needs 4 ranks
    fix = f"leave out {name}, or {group}={' or '.join(having)}"
    chosen = next((w for w in reversed(argv) if w.partition("=")[0] == group), "")
    fixed = any(word.startswith(("recipe=", "resume=", "fork=")) for word in argv)
    who = chosen or (f"the chosen {group}" if fixed or not argv else f"{group}={default_options()[group]}")
    return f"{as_typed(name, argv)}: {who} has no such setting\n  fix: {fix}"


def of_two_options(text: str) -> str:
    """Explain a recipe whose defaults list names a group that has an option already."""
    multiple = re.match(r"Multiple values for ([\w/]+)\. To override a value use '(.*): (.*)'", text)
    if not multiple:
        return ""
    group, _, option = multiple.groups()
    fix = f"in the file, `defaults: [override /{group.removeprefix('/')}: {option}]`"
    return f"{group}={option}: there is a {group} already\n  fix: {fix}"


def of_two_values(text: str) -> str:
    """Explain KEY=A,B without -m."""
    ambiguous = re.match(r"Ambiguous value for argument '(.*)'", text)
    if not ambiguous:
        return ""
    setting = ambiguous[1].partition("=")[0]
    comma = re.fullmatch(r"([^=]+)=(?:(0),(\d+)|(\d{1,3}),(000))", ambiguous[1])
    if comma:  # 0,001 and 1,000 are meant as one number
        one = f"{comma[1]}=0.{comma[3]}" if comma[2] else f"{comma[1]}={comma[4]}{comma[5]}"
    elif is_list(setting):
        return f"{ambiguous[1]}: is more than one value\n  fix: '{setting}=[{ambiguous[1].partition('=')[2]}]'"
    else:
        one = ambiguous[1].partition(",")[0].strip()
    values = ambiguous[1].partition("=")[2].split(",")
    is_sweep = setting not in known_settings() or all(accepted(setting, value.strip()) for value in values)
    fix = f"{one}, or -m {ambiguous[1]}" if is_sweep else one
    return f"{ambiguous[1]}: is more than one value\n  fix: {fix}"


def of_any_other(error: BaseException, text: str) -> str:
    """Shorten an error that none of the cases knows."""
    full_key = getattr(error, "full_key", None)
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    noise = ("See ", "Set the env", "full_key:", "object_type=", "reference_type=")
    lines = [line for line in lines if not line.startswith(noise)]
    what = (f"{full_key}: " if full_key else "") + (" ".join(lines[:2]) if lines else type(error).__name__)
    return f"{what}\n  fix: dtrain launch --help shows every group and setting"


def is_list(key: str) -> bool:
    """Does the setting, or the group, take a list?"""
    return key in SEVERAL or isinstance(default_of(key), list)


def as_typed(name: str, argv: Sequence[str]) -> str:
    """Return the word of a command line that is about a setting; the name alone if the word may have a secret."""
    word = next((word for word in argv if word.partition("=")[0].lstrip("+~") == name), name)
    return name if SECRET.search(word) else word


def not_chosen(name: str) -> str:
    """Explain a setting of a hook or logger that no chosen one has; "" if the name is of another kind."""
    group, _, setting = name.partition(".")
    section, _, setting = setting.partition(".")
    options = options_of(group) if group in SEVERAL else []
    if not setting or not options or section in options:
        return ""
    near = difflib.get_close_matches(section.lower(), options, 1, 0.6)
    fix = f"{group}={near[0]} {group}.{near[0]}.{setting}=…" if near else f"{group}=MODULE.{section} {name}=…"
    return f"{name}: {section} is not among the chosen {group.rstrip('s')}s\n  fix: {fix}"


def with_unit(word: str, argv: Sequence[str]) -> str:
    """Join a unit to the number before it: cluster.mem=64 GB. "" if it is none."""
    before = argv[argv.index(word) - 1] if word in argv[1:] else ""
    found = re.fullmatch(r"([\w.]+)=([\d.]+)", before)
    if not word.isalpha() or not found or found[1] not in known_settings():
        return ""
    # of a setting that only the typed option of its group has, nothing is known
    is_text = accepted(found[1], f"{found[2]}{word}") or not accepted(found[1], found[2])
    return f"{before}{word}" if is_text else ""


def probably_meant(word: str, argv: Sequence[str] = ()) -> str:
    """Guess the intended override for `fsdp`, `strategy:fsdp`, `train.steps = 5`, `net.py` or `run_dir=a=b`.

    argv: all words, for a setting and a value that a space separates.
    """
    if re.fullmatch(r"[\w./-]+\.py", word):
        return f"script={word}"
    if re.search(r"\.ya?ml$", word) and Path(word).is_file():
        return f"recipe={word if '/' in word else f'./{word}'}"
    if re.fullmatch(r"[\w.]+=\S+,", word) and word in argv:  # -m optim.lr=1e-3, 3e-3
        values = [word]
        for part in argv[argv.index(word) + 1 :]:
            if "=" in part or part.startswith("-") or not values[-1].endswith(","):
                break
            values.append(part)
        together = "".join(values).rstrip(",")
        return f"-m {together}   (no space after a comma)" if "," in together else together
    if drawn := re.fullmatch(r"([\w.]+)=(?:tune\.)?(log_?uniform|q?uniform|q?randint|lograndint)\((.*)\)", word):
        key, kind, bounds = drawn[1], drawn[2], ",".join(drawn[3].replace(" ", "").split(",")[:2])
        space = f"{'range' if 'int' in kind else 'interval'}({bounds})"
        return f"'{key}={f'tag(log,{space})' if 'log' in kind else space}'   (for dtrain search)"
    if nested := re.fullmatch(r"(\w+)=([\w.]+)=(\S*)", word):  # train=steps=3
        meant = f"{nested[1]}.{nested[2]}"
        if meant in known_settings() and accepted(meant, nested[3]):
            return f"{meant}={nested[3]}"
    if together := with_unit(word, argv):
        return together
    if word in argv and (word in GROUPS or word in known_settings()):
        following = [part for part in argv[argv.index(word) + 1 :][:2] if part != "="]
        if following and accepted(word, following[0].lstrip("=")):  # strategy fsdp, train.steps = 5
            return f"{word}={accepted(word, following[0].lstrip('='))}"
        if word in GROUPS:
            return f"{word}={default_options()[word]}; {word} can be {', '.join(options_of(word))}"
    for group in GROUPS:
        if word in options_of(group):
            return f"{group}={word}"
    if fix := called(*word.partition("=")[::2]):
        return fix
    pair = re.fullmatch(r"\s*([A-Za-z_][\w.]*)\s*[=:/ ]\s*(.*?)\s*|\s*([A-Za-z_][\w.-]*)\s*", word)
    if pair is None:
        return "key=value"
    key, value = pair[1] or pair[3], (pair[2] or "").strip("=")
    before = argv[argv.index(word) - 1] if word in argv[1:] else ""
    if pair[3] and word not in known_settings() and re.fullmatch(r"[\w.]+=[^'\"]+", before):  # run_dir=my folder
        name, _, begun = before.partition("=")
        return f"leave out {word}; if it belongs to the value before it: '{name}=\"{begun} {word}\"'"
    if value.startswith("[") and value.endswith("]") and "=" in value:  # [--cpu-bind=none]
        items = ",".join(f'"{item.strip()}"' for item in value[1:-1].split(","))
        return f"'{key}=[{items}]'"
    if is_list(key) and (pair := re.fullmatch(r"\((.*)\)", value)):  # (0.9,0.95), as in Python
        return f"'{key}=[{pair[1]}]'"
    simple = re.fullmatch(r"[\w./-]*", value, re.ASCII)
    if not simple and key in known_settings() and not accepted(key, "text"):  # a number, or a list
        number = re.search(r"-?\d[\w.+-]*", value)
        if number and accepted(key, number[0]):  # train.steps=[1
            return f"{key}={number[0]}"
        if value.startswith("[") and "]" not in value:
            return f"'{key}={value}]'"
    if simple and not value:  # train.steps==
        default = default_of(key)
        value = str(default) if isinstance(default, (int, float)) and not isinstance(default, bool) else "…"
    return f"{key}={value}" if simple else f"'{key}=\"{value}\"'"
