"""Secrets of the environment: the value of a variable named like one reaches no file, no screen and no job name."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping
from typing import Any

HIDDEN = "<redacted>"
SHORTEST = 8  # shorter values are words such as "true" or "offline", and would be found everywhere
# WANDB_API_KEY, HF_TOKEN, APIKEY, AWS_SECRET_ACCESS_KEY; not TOKENIZERS_PARALLELISM, XKB_KEYMAP
NAME = re.compile(r"(KEY|TOKEN|SECRET|PASSWORD|PASSWD|CREDENTIAL|_PASS|_PWD|_PAT)S?(?![A-Z])", re.IGNORECASE)
# a setting that is named like one
SECRET = re.compile(r"(^|[._-])(((api|access)_?key|secret|password|passwd|credential)s?|token)$", re.IGNORECASE)
FROM_ENVIRONMENT = re.compile(r"oc\.env:\s*['\"]?(\w+)")


def secrets() -> dict[str, str]:
    """Secret-like variables of this process and their values. A path that exists is where a secret lies, not one."""
    found = {name: value.strip() for name, value in os.environ.items() if NAME.search(name)}
    return {n: v for n, v in found.items() if len(v) >= SHORTEST and not (v[0] in "/~." and os.path.exists(v))}


def hide(text: str) -> str:
    """Text with every secret's value blacked out, also where quotes or line breaks in it were escaped."""
    if not (known := secrets()):
        return text
    import json  # only now: a plan does not wait for it

    for value in sorted(known.values(), key=len, reverse=True):  # one may begin with another
        for form in {value, json.dumps(value)[1:-1], repr(value)[1:-1]}:
            text = text.replace(form, HIDDEN)
    return text


def hidden(node: Any) -> Any:
    """Values as they may be written: no text, and no key, holds a secret's value."""
    if isinstance(node, str):
        return hide(node)
    if isinstance(node, Mapping):
        return {hide(k) if isinstance(k, str) else k: hidden(v) for k, v in node.items()}
    return [hidden(item) for item in node] if isinstance(node, (list, tuple)) else node


def redact(node: Any) -> Any:
    """`hidden`, and what stands under a setting that is named like a secret is blacked out, too."""
    if isinstance(node, list):
        return [redact(item) for item in node]
    if not isinstance(node, dict):
        return hidden(node)
    return {hidden(k): HIDDEN if v and SECRET.search(str(k)) else redact(v) for k, v in node.items()}


def check_arguments(argv: Iterable[str]) -> None:
    """Refuse an override that holds a secret, or asks for one: Hydra writes overrides to disk, and prints them."""
    known = secrets()
    for word in argv:
        asked = [name for name in FROM_ENVIRONMENT.findall(word) if name in known]
        if asked or (asked := [name for name, value in known.items() if value in word]):
            raise refused(word.partition("=")[0] if "=" in word else "…", asked[0])


def check(node: Any, key: str = "") -> None:
    """Refuse a setting whose value holds a secret: it would be in config.yaml, or in a path or a job name."""
    if not (known := secrets()):
        return
    if isinstance(node, Mapping):
        for name, value in node.items():
            check(str(name), key)
            check(value, f"{key}.{name}" if key else str(name))
    elif isinstance(node, (list, tuple)):
        for item in node:
            check(item, key)
    elif isinstance(node, str):
        for name, value in known.items():
            if value in node:
                raise refused(key, name)


def refused(key: str, variable: str) -> ValueError:
    rule = f"has the value of ${variable}, and a configuration is written to disk in several places"
    fix = f"leave it out: each rank has ${variable} in its environment"
    return ValueError(f"{hide(key)}=…: {rule}\n  fix: {fix}")
