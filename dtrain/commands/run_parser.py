"""The parser of the commands: its errors are like those of settings, with a fix, also where a RUN is missing."""

from __future__ import annotations

import argparse
import difflib
import itertools
import os
import re
import shlex
import sys
from collections.abc import Sequence
from typing import Any, NoReturn

from dtrain.errors import bad

TRUST = "your own modules that the run uses; 'trust=[MODULE]' is the same"
CHECKPOINT = "a run folder, a part of its name, or latest; RUN@STEP or RUN@best for another than the newest checkpoint"

OUTPUTS = ("o", "out", "output", "output-dir", "output-file", "output-path", "out-dir", "file", "dest")


class RunParser(argparse.ArgumentParser):
    """Takes `trust=[MODULE]` for `--trust MODULE`, like the launcher, and finds modules of the working folder."""

    words: Sequence[str] = ()  # as typed, for a fix

    def parse_args(self, args: Sequence[str] | None = None, namespace: Any = None) -> Any:  # type: ignore[override]
        words = list(sys.argv[1:] if args is None else args)
        self.words = words
        if any("--trust" in action.option_strings for action in self._actions):
            listed = [word.removeprefix("trust=").strip("[]").split(",") for word in words if is_trust(word)]
            words = [word for word in words if not is_trust(word)]
            names = [name.strip() for found in listed for name in found if name.strip()]
            words += ["--trust", *names] if names else []  # at the end: what follows --trust counts as its modules
        # intermixed: evaluate RUN --batch-size 8 data=text
        some = any(not action.option_strings and action.nargs == "*" for action in self._actions)
        options = (self.parse_intermixed_args if some else super().parse_args)(words, namespace)
        for name in getattr(options, "trust", None) or ():
            if not re.fullmatch(r"[^\W\d][\w.]*", name):
                raise bad("--trust", name, "is not the name of a module", f"put {name} before --trust")
        if getattr(options, "trust", None) and os.getcwd() not in sys.path:
            sys.path.append(os.getcwd())  # last, like the launcher: nothing there hides a package
        return options

    def error(self, message: str) -> NoReturn:
        if re.match(r"the following arguments are required: (run|RUN)\b", message):
            from dtrain.runs.find import no_run

            needed = [a.dest.upper() for a in self._actions if not a.option_strings and a.nargs is None]
            options = [
                word for a in self._actions if a.required and (n := a.option_strings) for word in as_typed(n[0], a)
            ]
            raise no_run(" ".join([self.prog, "latest", *(name for name in needed if name != "RUN"), *options]))
        if found := re.fullmatch(r"the following arguments are required: (.*)", message):
            by_name = {"/".join(a.option_strings) or a.dest.upper(): a for a in self._actions}
            names = [name if name.startswith("-") else name.upper() for name in found[1].split(", ")]
            words = [word for name in names for word in as_typed(name, by_name.get(name))]
            fix = f"{self.prog} {shlex.join([*self.words, *words])}"
            shown = " ".join(n if (a := by_name.get(n)) and a.choices else shlex.join(as_typed(n, a)) for n in names)
            raise ValueError(f"{shown}: {'is' if len(names) == 1 else 'are'} missing\n  fix: {fix}")
        if found := re.fullmatch(r"unrecognized arguments: (.*)", message):
            raise self._unrecognized(found[1].split()[0])
        found = re.match(r"argument ([^:]+): (.*)", message, re.DOTALL)
        names = found[1].split("/") if found else []  # -o/--output
        action = next((a for a in self._actions if {*names} & {*a.option_strings, a.dest, a.metavar}), None)
        if found is None or action is None:
            raise ValueError(f"{message}\n  fix: {self.prog} --help shows the arguments")
        raise self._wrong_value(names[-1], action, found[2])

    def _unrecognized(self, word: str) -> ValueError:
        positions = {action.dest for action in self._actions if not action.option_strings}
        plain = list(itertools.takewhile(lambda part: not part.startswith("-"), self.words))
        if "prompt" in positions and word in plain[2:]:  # without quotes
            words = [plain[0], " ".join(plain[1:]), *self.words[len(plain) :]]
            return ValueError(f"{word}: is one argument too many\n  fix: {self.prog} {shlex.join(words)}")
        if not word.startswith("-"):
            return ValueError(f"{word}: is one argument too many\n  fix: leave out {word}; {self.prog} --help")
        options = [name for action in self._actions for name in action.option_strings if name.startswith("--")]
        near = difflib.get_close_matches(word.partition("=")[0].lower(), options, 1, 0.6)
        name, _, value = word.partition("=")
        if name.lstrip("-").replace("_", "-") in OUTPUTS and "out" in positions:  # it has no option for it
            words = [value if part == word else part for part in self.words if part != word or value]
            return ValueError(f"{name}: there is no such option\n  fix: {self.prog} {shlex.join(words)}")
        fix = f"did you mean {near[0]}?" if near else f"leave out {word}; {self.prog} --help lists the options"
        return ValueError(f"{word}: there is no such option\n  fix: {fix}")

    def _wrong_value(self, name: str, action: argparse.Action, rule: str) -> ValueError:
        """Explain a value that argparse does not take for this argument."""
        typed = re.match(r"invalid (\w+)(?: value)?: (['\"]?)(.*?)\2(?: \(choose from .*\))?$", rule, re.DOTALL)
        choices, is_option = [str(choice) for choice in action.choices or ()], bool(action.option_strings)
        if choices:
            near = difflib.get_close_matches(typed[3].lower(), choices, 1, 0.5) if typed else []
            fix = f"did you mean {f'{name} ' if is_option else ''}{near[0]}? " if near else ""
            fix += f"{name} can be {', '.join(choices)}"
        else:
            number = re.search(r"\d+(\.\d+)?" if typed[1] == "float" else r"\d+", typed[3]) if typed else None
            value = number[0] if number else str(action.default or action.metavar or action.dest.upper())
            words = [value if typed and word == typed[3] else word for word in self.words]
            fix = f"{name} {value}" if is_option else f"{self.prog} {shlex.join(words)}"
        if typed is None:
            return ValueError(f"{name}: {'needs a value' if rule.startswith('expected') else rule}\n  fix: {fix}")
        kinds = {"choice": "there is no such choice", "int": "must be a whole number", "float": "must be a number"}
        return bad(name, typed[3], kinds.get(typed[1], f"is not a {typed[1]}"), fix)


def as_typed(name: str, action: argparse.Action | None) -> list[str]:
    """Return a required argument as it is typed: -o OUT; its first choice, if it has some."""
    value = str(next(iter(action.choices))) if action and action.choices else name
    if action is None or not action.option_strings:
        return [value]
    return [action.option_strings[0], value if action.choices else str(action.metavar or action.dest.upper())]


def is_trust(word: str) -> bool:
    return word.startswith("trust=")
