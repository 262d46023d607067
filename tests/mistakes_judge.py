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
    tried: str = ""  # the command that follows from the fix; "" if only a person can follow it

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


def followed(command: list[str], screen: str) -> list[str] | None:
    """Return the command after its fix, with dry_run=true; None if the fix is not a thing to type."""
    found = re.search(r"^ *fix: (.*)", screen, re.MULTILINE)
    if not found:
        return None
    text = found[1]
    if meant := re.search(r"did you mean (\S+?)\?", text):
        return renamed(command, screen, meant[1])
    clause = re.split(r", or |; |   \(|, which ", text)[0]
    clause = re.split(r" or ", clause)[0]
    if "…" in clause or "VALUE" in clause:
        return None
    try:
        words = shlex.split(clause)
    except ValueError:
        return None
    if words[:2] == ["leave", "out"]:
        gone = [word.rstrip("=,").lstrip("+") for word in words[2:]]
        kept = [w for w in command if w.lstrip("+").partition("=")[0] not in gone and w not in gone]
        return dry(kept) if len(kept) < len(command) and all(re.fullmatch(r"[~\w.-]+", w) for w in gone) else None
    if words[:2] == ["dtrain", "launch"]:
        return dry(words[1:])
    if words and all(OVERRIDE.fullmatch(word) for word in words):
        keys = {word.partition("=")[0].lstrip("+") for word in words}
        # a section is replaced with its settings; a word that is not key=value is what the fix is about
        kept = [w for w in command[1:] if w.partition("=")[0].lstrip("+~") not in keys and "=" in w]
        typed = re.search(r"error: (\S+?)[:=]", screen)
        wrong = typed[1].lstrip("+-") if typed else ""
        kept = [w for w in kept if w.partition("=")[0].lstrip("+-") != wrong or not unknown_setting(screen)]
        return dry([command[0], *kept, *words])
    return None


def unknown_setting(screen: str) -> bool:
    return "there is no such setting" in screen or "not understood" in screen


def renamed(command: list[str], screen: str, meant: str) -> list[str] | None:
    typed = re.search(r"error: ([^\s:]+)", screen)
    if not typed:
        return None
    wrong = typed[1].partition("=")[0]
    if "=" in meant:  # an option
        key = meant.partition("=")[0]
        return dry([w for w in command if w.lstrip("+").partition("=")[0] not in (key, wrong)] + [meant])
    for i, word in enumerate(command):
        name, sign, value = word.partition("=")
        if name.lstrip("+") == wrong and sign:
            return dry([*command[:i], f"{meant}={value}", *command[i + 1 :]])
    return None


def dry(command: list[str]) -> list[str] | None:
    return [*command, "dry_run=true"] if command and command[0] == "launch" else None
