"""`dtrain launch`: print the help without Hydra, which takes 1.4 s to compose it; start everything else.

Hydra still writes the help of a configuration with changed settings, as in `launch --help train.steps=5`.
"""

from __future__ import annotations

import textwrap
from collections.abc import Iterator

from dtrain.config import describe
from dtrain.config.files import CONF, GROUPS, RECIPES, default_options, options_of, read_yaml, setting_prefix

WIDTH, COLUMN = 110, 40


def main(argv: list[str]) -> int:
    options = [word for word in argv if word not in ("-h", "--help")]
    if len(options) < len(argv) and all(map(is_option, options)):
        print(help_text(dict(word.split("=", 1) for word in options)))
        return 0
    pairs = zip(["", *options], options, strict=False)  # not the value of --cfg job
    loose = [word for before, word in pairs if "=" not in word and not {before[:1], word[:1]} & {*"-+~"}]
    if len(options) < len(argv) and loose:
        from dtrain.commands.explain import explain

        fix = f"dtrain explain {loose[0]}" if list(explain(loose[0])) else "dtrain launch --help"
        raise ValueError(f"{loose[0]}: --help takes GROUP=OPTION, and no other word\n  fix: {fix}")
    from dtrain.launch import app

    return app.main(argv)


def is_option(word: str) -> bool:
    """Is it an option of a group that chooses nothing in another group, as models do with data?"""
    group, _, option = word.partition("=")
    if group not in GROUPS or option not in options_of(group):
        return False
    return "override /" not in (CONF / group / f"{option}.yaml").read_text(encoding="utf-8")


def help_text(options: dict[str, str]) -> str:
    """Fill the template in conf/config.yaml; options: the chosen ones, by group."""
    of_hydra = read_yaml(CONF / "config.yaml")["hydra"]["help"]
    parts = {
        "${hydra.help.header}": of_hydra["header"],
        "$APP_CONFIG_GROUPS": lines_of(groups(default_options() | options)),
        "$CONFIG": lines_of(settings(default_options() | options)),
    }
    text: str = of_hydra["template"]
    for name, part in parts.items():
        text = text.replace(name, part)
    return text


def lines_of(lines: Iterator[str]) -> str:
    return "\n".join(lines) + "\n"


def groups(options: dict[str, str]) -> Iterator[str]:
    for group, meaning in describe.group_meanings().items():
        yield from textwrap.wrap(f"{group}: {meaning}", WIDTH, subsequent_indent="    ")
        names = (f"{name} (default)" if name == options[group] else name for name in options_of(group))
        yield from indented(", ".join(names))
    yield "recipe: A complete configuration to start from."
    yield from indented(", ".join(path.stem for path in sorted(RECIPES.glob("*.yaml"))))
    yield from indented(", ".join(f"tiny/{path.stem}" for path in sorted(RECIPES.glob("tiny/*.yaml"))))


def settings(options: dict[str, str]) -> Iterator[str]:
    """Yield every plain setting, then those of the options, each with its default and its meaning."""
    for setting in describe.top_settings():
        yield from with_meaning(setting.name, setting)
    for group, option in sorted(options.items(), key=lambda item: item[0] == "hardware"):  # the longest, so the last
        found = describe.settings_of(group, option)
        if found:
            yield from ("", f"{group}={option}")
        for setting in found:
            yield from with_meaning(f"{setting_prefix(group, option)}.{setting.name}", setting)


def with_meaning(name: str, setting: describe.Setting) -> list[str]:
    default = setting.default.replace("`", "")
    start = f"  {name} ({default})" if default in ("required", "empty") else f"  {name}={default}"
    lines = textwrap.wrap(setting.meaning, WIDTH - COLUMN) or [""]
    if len(start) >= COLUMN:  # on a line of its own
        lines = ["", *lines]
    return [f"{left:<{COLUMN}}{line}".rstrip() for left, line in zip([start, *[""] * len(lines)], lines, strict=False)]


def indented(text: str) -> list[str]:
    return textwrap.wrap(text, WIDTH, initial_indent="    ", subsequent_indent="    ", break_on_hyphens=False)
