"""Write docs/cli.md and docs/configuration.md from the code and from conf/.

    python docs/generate.py            write both pages
    python docs/generate.py --check    exit with 1 if one of them is not current

Sources: the --help text of each command; the keys, values and comments of conf/**/*.yaml; the constructor signatures
that dtrain.config.schema reads. The meaning of a setting is the comment beside it (or the comment lines directly above
it), so a missing meaning is fixed in conf/. This file imports no torch.
"""

from __future__ import annotations

import ast
import contextlib
import functools
import io
import os
import re
import sys
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

DOCS = Path(__file__).resolve().parent
sys.path.insert(0, str(DOCS.parent))

from dtrain import cli  # noqa: E402
from dtrain.config import schema  # noqa: E402
from dtrain.config.files import CONF, GROUPS, flatten, options_of, read_yaml, section, setting_prefix  # noqa: E402
from dtrain.runs import protocol  # noqa: E402

WIDTH = "100"  # columns of the help texts
SOURCE = "<!-- Written by docs/generate.py. Do not edit: change the code or the comments in conf/. -->"
GROUP_MEANINGS = "# What each group decides:"  # the heading of a comment in conf/config.yaml
FAMILIES = ("model",)  # groups whose options are sizes of one class: one table for all of them


# ---- cli.md --------------------------------------------------------------------------------------------------


def help_text(*words: str) -> str:
    """What `dtrain WORDS --help` prints."""
    out = io.StringIO()
    code: object = 0
    fixed = {"COLUMNS": WIDTH, "NO_COLOR": "1"}
    with mock.patch.dict(os.environ, fixed), contextlib.redirect_stdout(out), contextlib.redirect_stderr(io.StringIO()):
        try:
            code = cli.main([*words, "--help"])
        except SystemExit as stop:  # argparse
            code = stop.code
    assert not code, f"dtrain {' '.join(words)} --help ends with {code}"
    return "\n".join(line.rstrip() for line in out.getvalue().strip().splitlines())


def summaries() -> dict[str, str]:
    """The one-line summary of each command in `dtrain --help`."""
    found = re.findall(r"^  (\w+)\b.*?  +(\S.*)$", cli.USAGE, re.MULTILINE)
    return {name: text.strip() for name, text in found}


def exit_codes() -> list[tuple[int, str]]:
    """(code, meaning), from the last sentence of `dtrain --help`."""
    sentence = " ".join(cli.USAGE.partition("Exit codes: ")[2].split()).rstrip(".")
    codes = [(int(code), text) for code, text in re.findall(r"(\d+) ([^,]+)", sentence)]
    known = (protocol.DONE, protocol.BAD_CONFIG, protocol.FAILED, protocol.PREFLIGHT, protocol.PREEMPTED)
    assert tuple(code for code, _ in codes) == known, "cli.USAGE and runs/protocol.py name the same exit codes"
    return codes


def fenced(text: str) -> list[str]:
    return ["```text", text, "```", ""]


def launch_help() -> str:
    """Hydra's help without the composed configuration: configuration.md describes each setting."""
    whole = help_text("launch")
    head, found, rest = whole.partition("== Settings, with their defaults ==\n")
    settings, _, tail = rest.partition("== Common commands ==\n")
    assert found and settings and tail, "conf/config.yaml: hydra.help.template has these headings"
    return f"{head}{found}(left out here: the composed configuration)\n\n== Common commands ==\n{tail}"


def cli_page() -> str:
    lines = [
        "# Commands", "", SOURCE, "",
        "`dtrain COMMAND …` is the command line. In a checkout, `python launch.py …` is the same as `dtrain launch …`.",
        "The texts below are what `--help` prints. [configuration.md](configuration.md) lists the settings.", "",
        "## Exit codes", "", "| code | meaning |", "|---|---|",
        *(f"| {code} | {text} |" for code, text in exit_codes()),
        "| 130 | interrupted before a run began |", "",
        "Error messages go to stderr. `HYDRA_FULL_ERROR=1` adds the traceback.", "",
        "## dtrain", "", *fenced(help_text()),
    ]  # fmt: skip
    about = summaries()
    for name in cli.COMMANDS:
        lines += [f"## dtrain {name}", "", about[name][:1].upper() + about[name][1:] + ".", ""]
        lines += fenced(launch_help() if name == "launch" else help_text(name))
        if name == "plan":
            lines += ["### dtrain plan calibrate", "", *fenced(help_text("plan", "calibrate"))]
    lines += ["## dtrain version", "", "Prints the version of dtrain.", ""]
    return "\n".join(lines).rstrip() + "\n"


# ---- comments of a yaml file ---------------------------------------------------------------------------------


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
            found[name] = escaped(note)
        parents.append((indent, key))
        above = []
    return Comments(" ".join(header), found)


# ---- configuration.md ----------------------------------------------------------------------------------------


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
    return escaped(comments(CONF / group / f"{option}.yaml").header)


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


def escaped(text: str) -> str:
    """A comment as Markdown: outside code spans, * is a star."""
    return "".join(part if part.startswith("`") else part.replace("*", r"\*") for part in re.split(r"(`[^`]*`)", text))


def cell(text: str) -> str:
    return re.sub(r"(?<!\\)\|", r"\\|", text) or " "


def table(headings: list[str], rows: list[list[str]]) -> list[str]:
    lines = [headings, ["---"] * len(headings), *rows]
    return ["| " + " | ".join(cell(text) for text in row) + " |" if row[0] != "---" else "|" + "|".join(row) + "|"
            for row in lines] + [""]  # fmt: skip


def setting_rows(prefix: str, settings: list[Setting]) -> list[str]:
    rows = [[f"`{prefix}{s.name}`", s.type, s.default, s.meaning] for s in settings]
    return table(["setting", "type", "default", "meaning"], rows) if rows else ["It has no settings.", ""]


def family_section(group: str, options: list[str]) -> list[str]:
    """Options that are sizes of one class: the settings once, then the values of each size."""
    by_name = {option: {s.name: s for s in settings_of(group, option)} for option in options}
    first = by_name[options[0]]
    rows, differing = [], []
    for name, setting in first.items():
        notes = Counter(
            note for o in options if (note := comments(CONF / group / f"{o}.yaml").settings.get(name))
        ).most_common(1)
        values = {by_name[option][name].default for option in options}
        if len(values) > 1:
            differing.append(name)
        default = setting.default if len(values) == 1 else "see below"
        rows.append([f"`{group}.{name}`", setting.type, default, notes[0][0] if notes else setting.meaning])
    lines = table(["setting", "type", "default", "meaning"], rows)
    if differing:
        values_of = [[f"`{name}`", *(by_name[option][name].default for option in options)] for name in differing]
        lines += table(["setting", *(f"`{option}`" for option in options)], values_of)
    return lines


def changes(group: str, option: str) -> list[str]:
    """What an option changes of the one that it builds on."""
    path = CONF / group / f"{option}.yaml"
    own = {key: value for key, value in read_yaml(path).items() if key != "defaults"}
    variables = own.get("fabric", {}).pop("env", {})
    notes = comments(path).settings
    rows = [[f"`{group}.{name}`", as_value(value), notes.get(name, "")] for name, value in flatten(own).items()]
    lines = table(["setting", "value", "note"], rows) if rows else []
    if variables:
        shown = [[f"`{name}`", as_value(entry["value"]), entry["why"]] for name, entry in variables.items()]
        lines += ["Environment variables (`cluster.fabric.env`):", "", *table(["variable", "value", "why"], shown)]
    return lines


@functools.cache
def group_meanings() -> dict[str, str]:
    """`# GROUP: what it decides` in the comment at the top of conf/config.yaml."""
    text = (CONF / "config.yaml").read_text(encoding="utf-8").partition(GROUP_MEANINGS)[2]
    return dict(re.findall(r"^#   (\w+): (.+)$", text, re.MULTILINE))


@functools.cache
def default_options() -> dict[str, str]:
    entries = read_yaml(CONF / "config.yaml")["defaults"]
    chosen: dict[str, str] = {}
    for entry in entries:
        if isinstance(entry, dict):
            chosen |= {group: str(option) for group, option in entry.items() if group in GROUPS}
    return chosen


def group_section(group: str) -> list[str]:
    default = default_options()[group]
    about = group_meanings()[group]
    lines = [f"## {group}", "", f"{about} Default: `{group}={default}`. Files: [conf/{group}](../conf/{group}).", ""]
    rows = [[f"`{group}={o}`", first_sentence(description(group, o))] for o in options_of(group)]
    lines += table(["option", "what it is"], rows)
    done: set[str] = set()
    for option in sorted(options_of(group), key=lambda name: (base_of(group, name) is not None, name)):
        if option in done:
            continue
        target, base = target_of(group, option), base_of(group, option)
        if group in FAMILIES:
            options = [other for other in options_of(group) if target_of(group, other) == target]
            lines += [f"### {group}: {', '.join(options)}", "", *family_section(group, options)]
            done |= set(options)
        elif base:
            lines += [f"### {group}={option}", "", description(group, option), ""]
            lines += [f"The settings are those of `{group}={chain(group, option)[-1]}`. "
                      f"Changed values, compared with `{group}={base}`:", "", *changes(group, option)]  # fmt: skip
        else:
            lines += [f"### {group}={option}", "", description(group, option), ""]
            lines += setting_rows(f"{setting_prefix(group, option)}.", settings_of(group, option))
    return lines


def configuration_page() -> str:
    lines = [
        "# Configuration", "", SOURCE, "",
        "A configuration has groups and settings. A group is a choice among the files of a folder of `conf/`:",
        "`strategy=fsdp` chooses `conf/strategy/fsdp.yaml`. A setting is one value: `train.steps=1000`. Both are",
        "Hydra overrides, for the command line, a recipe or `dtrain.fit`. A value such as `${model.seq_len}` is read",
        "from another setting. `null` means that nothing is set. `required` means that you must give a value.", "",
        "`python launch.py --cfg job` prints the configuration that your overrides make.", "",
        "## Groups", "",
        *table(["group", "decides", "default"], [
            [f"[`{group}`](#{group})", group_meanings()[group], f"`{default_options()[group]}`"] for group in GROUPS
        ]),
        "## Settings without a group", "",
        "They are in [conf/config.yaml](../conf/config.yaml).", "",
        *setting_rows("", top_settings()),
        "## Settings of script=", "",
        "`script=FILE` starts [your own program](scripts.md) instead of the training loop. It has the groups",
        "`cluster`, `hardware`, `logger` and `preflight`, and these settings, from",
        "[conf/script.yaml](../conf/script.yaml):", "",
        *setting_rows("", [s for s in top_settings("script.yaml") if s.name.startswith("script.")]),
    ]  # fmt: skip
    for group in GROUPS:
        lines += group_section(group)
    return "\n".join(lines).rstrip() + "\n"


def without_meaning() -> list[str]:
    """Settings, options and groups that nobody has described, with the file where the comment belongs."""
    both = ("config.yaml", "script.yaml")
    missing = [f"conf/{file}: {s.name}" for file in both for s in top_settings(file) if not s.meaning]
    undescribed = [group for group in GROUPS if group not in group_meanings()]
    missing += [f"conf/config.yaml: {group} (below {GROUP_MEANINGS!r})" for group in undescribed]
    for group in GROUPS:
        for option in options_of(group):
            path = f"conf/{group}/{option}.yaml"
            if not description(group, option):
                missing.append(f"{path}: a comment at the top that says what it is")
            missing += [f"{path}: {s.name}" for s in settings_of(group, option) if not s.meaning]
    return missing


# ---- both ----------------------------------------------------------------------------------------------------

PAGES = {"cli.md": cli_page, "configuration.md": configuration_page}


def main(argv: list[str]) -> int:
    if argv not in ([], ["--check"]):
        print(__doc__)
        return 2
    if missing := without_meaning():
        print("no comment says what these are:", *missing, sep="\n  ")
        return 1
    old = []
    for name, page in PAGES.items():
        path, text = DOCS / name, page()
        if not path.exists() or path.read_text(encoding="utf-8") != text:
            old.append(name)
            if not argv:
                path.write_text(text, encoding="utf-8")
    if argv and old:
        print(f"not current: {', '.join(old)}\n  fix: python docs/generate.py")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
