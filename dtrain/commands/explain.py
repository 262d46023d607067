"""`dtrain explain WORD …`: what a setting, a group or an option means, its type, its default and its values."""

from __future__ import annotations

import difflib
import textwrap
from collections.abc import Iterator

from dtrain.config.describe import (
    Setting,
    description,
    first_sentence,
    group_meanings,
    settings_of,
    top_settings,
)
from dtrain.config.files import GROUPS, default_options, known_settings, options_of, setting_prefix
from dtrain.errors import bad, foreign_option, unknown
from dtrain.runs.metrics import ALSO, MEANINGS

USAGE = """usage: dtrain explain SETTING|GROUP|GROUP=OPTION ...

  dtrain explain train.steps           what it means, its type and its default
  dtrain explain strategy              what the group decides, and its options
  dtrain explain strategy=fsdp         what the option is, and its settings
  dtrain explain fsdp                  the same
  dtrain explain strategy.bucket_mb    a setting of some options of a group
  dtrain explain val_loss              a metric
  dtrain explain warmup                every setting with this in its name or meaning

Exit codes: 0 done, 2 there is no such setting."""
WIDTH = 100


def main(argv: list[str]) -> int:
    if not argv or {"-h", "--help"} & set(argv):
        print(USAGE)
        return 0
    for number, word in enumerate(argv):
        lines = list(explain(word))
        group, _, option = word.partition("=")
        if not lines and group in GROUPS:
            near = difflib.get_close_matches(option, options_of(group), 1, 0.6)
            fix = f"did you mean {group}={near[0]}?" if near else f"dtrain explain {group}"
            raise bad(group, option, "there is no such option", fix)
        if not lines:
            raise no_such_word(word)
        print(*([""] if number else []), *lines, sep="\n")
    return 0


def explain(word: str) -> Iterator[str]:
    """Yield the lines that answer one word; none: nothing has this name."""
    word = "script.args" if word == "script_args" else word  # its short form
    group, _, option = word.partition("=")
    if group in GROUPS and option in options_of(group):
        yield from of_option(group, option)
    elif word in GROUPS:
        yield from of_group(word)
    elif section := [s for s in without_group() if s.name == word or s.name.startswith(f"{word}.")]:
        for setting in section:
            yield from of_setting(setting.name, setting)
    elif found := in_options(word):
        for setting, options in found.items():
            group = word.partition(".")[0]
            yield from of_setting(word, setting, f"under {', '.join(f'{group}={o}' for o in options)}")
    else:
        chosen = [name for name in GROUPS if word.lower() in options_of(name)]  # fsdp, and gpt2-124m
        chosen += [group for group in [word.partition(".")[0]] if group in GROUPS and word in dotted(group)]
        for name in chosen:
            yield from of_option(name, word.lower().removeprefix(f"{name}."))
        for name in GROUPS if not chosen else ():  # gpt2: gpt2-124m and others
            for option in options_of(name):
                if option.startswith(f"{word.lower()}-"):
                    yield from wrapped("", f"{name}={option}: {first_sentence(description(name, option))}")
        yield from of_metric(word.lower())
        if len(chosen) != 1:
            yield from containing(word.lower())


def dotted(group: str) -> list[str]:
    return [f"{group}.{option}" for option in options_of(group)]


def of_metric(word: str) -> Iterator[str]:
    name = word if word in MEANINGS else ALSO.get(word, "")
    if name:
        yield from wrapped(f"{name}: ", f"a metric of metrics.jsonl and the curves: {MEANINGS[name]}")


def no_such_word(word: str) -> ValueError:
    """Name the option, or the setting, that was probably meant."""
    for group in GROUPS:
        if ours := foreign_option(group, word):
            option = ours.partition(" ")[0]
            return ValueError(f"{word}: there is no such setting\n  fix: dtrain explain {option}")
    options = {option: group for group in GROUPS for option in options_of(group)}
    key = word.partition("=")[0]
    if "=" in word and list(explain(key)):  # train.steps=5
        return ValueError(f"{word}: there is no such setting\n  fix: dtrain explain {key}")
    refused = unknown(word, known_settings())
    near = difflib.get_close_matches(word.lower(), [*options, *MEANINGS, *ALSO], 1, 0.75)
    if near and "fix: leave out" in str(refused):
        name = f"{options[near[0]]}={near[0]}" if near[0] in options else near[0]
        return ValueError(f"{word}: there is no such setting\n  fix: did you mean dtrain explain {name}?")
    return refused


def of_group(group: str) -> Iterator[str]:
    yield from wrapped("", f"{group}: {group_meanings()[group]} Default: {group}={default_options()[group]}.")
    width = max(map(len, options_of(group)))
    for option in options_of(group):
        yield from wrapped(f"  {group}={option:<{width}}  ", first_sentence(description(group, option)))


def of_option(group: str, option: str) -> Iterator[str]:
    yield from wrapped("", f"{group}={option}: {description(group, option)}")
    for setting in settings_of(group, option):
        yield from of_setting(f"{setting_prefix(group, option)}.{setting.name}", setting)


def of_setting(name: str, setting: Setting, where: str = "") -> Iterator[str]:
    kind = setting.type.replace("`", "")
    default = setting.default.replace("`", "")
    yield f"{name}  ({kind}; {default if default == 'required' else f'default {default}'})"
    if where:
        yield from wrapped("  ", where)
    yield from wrapped("  ", setting.meaning)


def in_options(word: str) -> dict[Setting, list[str]]:
    """Return the settings of options that have this name, each with its options; equal ones are together."""
    found: dict[Setting, list[str]] = {}
    group = word.partition(".")[0]
    for option in options_of(group) if group in GROUPS else []:
        for setting in settings_of(group, option):
            if f"{setting_prefix(group, option)}.{setting.name}" == word:
                found.setdefault(setting, []).append(option)
    return found


def containing(word: str) -> Iterator[str]:
    """Yield all settings with this word in their name or meaning, one per line."""
    settings = {s.name: s for s in without_group()}
    for group in GROUPS:
        for option in options_of(group):
            prefix = setting_prefix(group, option)
            settings |= {f"{prefix}.{s.name}": s for s in settings_of(group, option)}
    found = {name: s for name, s in settings.items() if word in name.lower() or word in s.meaning.lower().split()}
    for name, setting in sorted(found.items()):
        yield from wrapped(f"{name}: ", setting.meaning)


def without_group() -> list[Setting]:
    of_script = [s for s in top_settings("script.yaml") if s.name.startswith("script")]  # the others are in both files
    return [*top_settings(), *of_script]


def wrapped(start: str, text: str) -> list[str]:
    return textwrap.wrap(start + text, WIDTH, subsequent_indent="    ")
