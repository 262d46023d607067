"""Redact secrets: the value of a secret-like environment variable reaches no file, screen or job name."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping
from typing import Any

HIDDEN = "<redacted>"
SHORTEST = 8  # shorter values are words such as "true" or "offline", and would match everywhere
# WANDB_API_KEY, HF_TOKEN, APIKEY, AWS_SECRET_ACCESS_KEY; not TOKENIZERS_PARALLELISM, XKB_KEYMAP
NAME = re.compile(r"(KEY|TOKEN|SECRET|PASSWORD|PASSWD|CREDENTIAL|_PASS|_PWD|_PAT)S?(?![A-Z])", re.IGNORECASE)
# a setting with a secret-like name
SECRET = re.compile(r"(^|[._-])(((api|access)_?key|secret|password|passwd|credential)s?|token)$", re.IGNORECASE)
# in an address: user:password@host, ?api_key=…
IN_ADDRESS = re.compile(
    r"(?<=://)[^/\s@]+(?=@)|(?<=[?&;])([\w-]*(?:token|key|secret|password|passwd|pwd)=)[^&;\s#'\"]+", re.I
)
FROM_ENVIRONMENT = re.compile(r"oc\.env:\s*['\"]?(\w+)")


def secrets() -> dict[str, str]:
    """Return secret-like variables of this process. An existing path is not a secret, only its location."""
    found = {name: value.strip() for name, value in os.environ.items() if NAME.search(name)}
    return {n: v for n, v in found.items() if len(v) >= SHORTEST and not (v[0] in "/~." and os.path.exists(v))}


def hide(text: str) -> str:
    """Redact every secret's value in a text, also where its quotes or line breaks are escaped, and in addresses."""
    if "://" in text:
        text = IN_ADDRESS.sub(lambda found: (found[1] or "") + HIDDEN, text)
    if not (known := secrets()):
        return text
    import json  # imported late, to keep `dtrain plan` fast

    for value in sorted(known.values(), key=len, reverse=True):  # longest first: one may be a prefix of another
        for form in {value, json.dumps(value)[1:-1], repr(value)[1:-1]}:
            text = text.replace(form, HIDDEN)
    return text


def hidden(node: Any) -> Any:
    """Redact every text and key, so that no secret's value is written."""
    if isinstance(node, str):
        return hide(node)
    if isinstance(node, Mapping):
        return {hide(k) if isinstance(k, str) else k: hidden(v) for k, v in node.items()}
    return [hidden(item) for item in node] if isinstance(node, (list, tuple)) else node


def redact(node: Any) -> Any:
    """Like `hidden`, but also redact every value under a secret-like key."""
    if isinstance(node, list):
        return [redact(item) for item in node]
    if not isinstance(node, dict):
        return hidden(node)
    return {hidden(k): HIDDEN if v and SECRET.search(str(k)) else redact(v) for k, v in node.items()}


def check_arguments(argv: Iterable[str]) -> None:
    """Reject an override that contains or reads a secret: Hydra writes overrides to disk and prints them."""
    known = secrets()
    for word in argv:
        asked = [name for name in FROM_ENVIRONMENT.findall(word) if name in known]
        if asked or (asked := [name for name, value in known.items() if value in word]):
            raise refused(word.partition("=")[0] if "=" in word else "…", asked[0])


def check(node: Any, key: str = "") -> None:
    """Reject a setting whose value contains a secret: it would end up in config.yaml, a path or a job name."""
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
