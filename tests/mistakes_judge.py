"""Judge a mistake's screen as far as a program can: the exit code, no traceback, one fix, and that the fix composes.

Whether the message is right is for a reader: `python -m tests.mistakes_run` prints every screen beside the verdict.
"""

from __future__ import annotations

import re
import shlex
from dataclasses import dataclass

OVERRIDE = re.compile(r"[~+]?[a-z_][\w.]*=\S+")


@dataclass(frozen=True)
class Verdict:
    faults: tuple[str, ...]
    tried: str = ""  # the commands that follow from the fix; "" if only a person can follow it

    @property
    def text(self) -> str:
        what = f"the fix, `{self.tried}`, composes" if self.tried and not self.faults else "the fix is for a reader"
        return "; ".join(self.faults) or f"as it should be; {what}"


def faults_of(code: int, wanted: int, screen: str) -> list[str]:
    found = [] if code == wanted else [f"exit code {code} instead of {wanted}"]
    if "Traceback" in screen:
        found.append("a traceback")
    if wanted == 2 and len(re.findall(r"^ *fix: ", screen, re.MULTILINE)) != 1:
        found.append("not one fix")
    return found


def followed(command: list[str], screen: str) -> list[list[list[str]]]:
    """Return the command after each alternative of its fix, with dry_run=true, in each way to read that alternative.

    Alternatives that are not a thing to type are left out.
    """
    found = re.search(r"^ *fix: (.*)", screen, re.MULTILINE)
    if not found:
        return []
    text = found[1]
    if meant := re.search(r"did you mean (\S+?)\?", text):
        return [ways] if (ways := renamed(command, screen, meant[1])) else []
    clauses = re.split(r"; |   \(|, which ", text)[0].split(", or ")
    return [ways for clause in clauses if (ways := alternative(command, screen, clause))]


def alternative(command: list[str], screen: str, text: str) -> list[list[str]]:
    clause = re.split(r" or ", text)[0]
    if re.search("…|VALUE|SETTING|FOLDER|FILE|OPTION", clause):
        return []
    try:
        words = shlex.split(clause)
    except ValueError:
        return []
    if words[:2] == ["leave", "out"]:
        gone = [word.rstrip("=,").lstrip("+") for word in words[2:]]
        kept = [w for w in command if w.lstrip("+").partition("=")[0] not in gone and w not in gone]
        return dry(kept) if len(kept) < len(command) and all(re.fullmatch(r"[~\w.-]+", w) for w in gone) else []
    if words[:2] == ["dtrain", "launch"]:
        return dry(words[1:])
    if not words or not all(word == "-m" or OVERRIDE.fullmatch(word) for word in words):
        return []
    keys = {key_of(word) for word in words}
    kept = [w for w in command[1:] if key_of(w) not in keys and ("=" in w or w == "-m")]
    typed = re.search(r"error: (\S+?)[:=]", screen)
    without = [w for w in kept if not typed or key_of(w) != typed[1].lstrip("+-~")]  # in the place of what was wrong
    ways = dry([command[0], *without, *words])
    return ways if len(without) == len(kept) else ways + dry([command[0], *kept, *words])  # or in addition


def key_of(word: str) -> str:
    return word.partition("=")[0].lstrip("+-~")


def renamed(command: list[str], screen: str, meant: str) -> list[list[str]]:
    typed = re.search(r"error: ([^\s:]+)", screen)
    if not typed:
        return []
    wrong = key_of(typed[1])
    if "=" in meant:  # an option
        return dry([w for w in command if key_of(w) not in (key_of(meant), wrong)] + [meant])
    for i, word in enumerate(command):
        if key_of(word) == wrong and "=" in word:
            return dry([*command[:i], f"{meant}={word.partition('=')[2]}", *command[i + 1 :]])
    return []


def dry(command: list[str]) -> list[list[str]]:
    return [[*command, "dry_run=true"]] if command and command[0] == "launch" else []
