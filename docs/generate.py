"""Write docs/cli.md and docs/configuration.md from the code and from conf/.

    python docs/generate.py            write both pages
    python docs/generate.py --check    exit with 1 if one of them is not current

Sources: the --help text of each command; the keys, values and comments of conf/**/*.yaml; the constructor signatures
that dtrain.config.schema reads. The meaning of a setting is the comment beside it (or the comment lines directly above
it), so a missing meaning is fixed in conf/. This file imports no torch.
"""

from __future__ import annotations

import contextlib
import io
import os
import re
import sys
from collections import Counter
from pathlib import Path
from unittest import mock

DOCS = Path(__file__).resolve().parent
sys.path.insert(0, str(DOCS.parent))

from dtrain import cli  # noqa: E402
from dtrain.commands.table import COMMANDS  # noqa: E402
from dtrain.config.describe import (  # noqa: E402
    GROUP_MEANINGS,
    Setting,
    as_value,
    base_of,
    chain,
    comments,
    description,
    first_sentence,
    group_meanings,
    settings_of,
    target_of,
    top_settings,
)
from dtrain.config.files import CONF, GROUPS, default_options, flatten, options_of, read_yaml, setting_prefix  # noqa: E402
from dtrain.runs import protocol  # noqa: E402

WIDTH = "100"  # columns of the help texts
SOURCE = "<!-- Written by docs/generate.py. Do not edit: change the code or the comments in conf/. -->"
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
    """The help without the settings: configuration.md describes each of them."""
    whole = help_text("launch")
    head, found, rest = whole.partition("== Settings, with their defaults ==\n")
    settings, _, tail = rest.partition("== Common commands ==\n")
    assert found and settings and tail, "conf/config.yaml: hydra.help.template has these headings"
    return f"{head}{found}(left out here: docs/configuration.md lists them)\n\n== Common commands ==\n{tail}"


def cli_page() -> str:
    lines = [
        "# Commands", "", SOURCE, "",
        "`dtrain COMMAND …` is the command line. In a checkout, `python launch.py …` is the same as `dtrain launch …`.",
        "The texts below are what `--help` prints. [configuration.md](configuration.md) lists the settings.", "",
        "## Exit codes", "", "| code | meaning |", "|---|---|",
        *(f"| {code} | {text} |" for code, text in exit_codes()),
        "| 130 | interrupted before a run began |", "",
        "2 is what a check of dtrain refuses: settings, files, and a model, data set, loss or hook of yours that does",
        "not fit, before the ranks start or in their first step. 3 is what Python or torch raises while your code",
        "runs, also in the first step: the last screen names your line, with a `fix:` where dtrain knows one.", "",
        "Error messages go to stderr. `HYDRA_FULL_ERROR=1` adds the traceback.", "",
        "## dtrain", "", *fenced(help_text()),
    ]  # fmt: skip
    for name, (_, _, summary, *_) in COMMANDS.items():
        lines += [f"## dtrain {name}", "", summary[:1].upper() + summary[1:] + ".", ""]
        lines += fenced(launch_help() if name == "launch" else help_text(name))
        if name == "plan":
            lines += ["### dtrain plan calibrate", "", *fenced(help_text("plan", "calibrate"))]
    lines += ["## dtrain version", "", "Prints the version of dtrain.", ""]
    return "\n".join(lines).rstrip() + "\n"


# ---- configuration.md ----------------------------------------------------------------------------------------


def escaped(text: str) -> str:
    """A comment as Markdown: outside code spans, * is a star."""
    return "".join(part if part.startswith("`") else part.replace("*", r"\*") for part in re.split(r"(`[^`]*`)", text))


def cell(text: str) -> str:
    return re.sub(r"(?<!\\)\|", r"\\|", escaped(text)) or " "


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
            lines += [f"### {group}={option}", "", escaped(description(group, option)), ""]
            lines += [f"The settings are those of `{group}={chain(group, option)[-1]}`. "
                      f"Changed values, compared with `{group}={base}`:", "", *changes(group, option)]  # fmt: skip
        else:
            lines += [f"### {group}={option}", "", escaped(description(group, option)), ""]
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
