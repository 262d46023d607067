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
# in code: a quoted text, or a long word with a digit, that is given to a secret-like name
_NAMED = (
    r"(?:(?:(?:api|access|secret|private|auth|account)[_-]?key|secret|password|passwd|pwd|credential)s?|token"
    r"|(?-i:[A-Z0-9]_KEY))"  # WANDB_KEY; not sort_key, nor num_tokens
)
_GIVEN = _NAMED + r"['\"]?\]?[ \t]{0,20}(?::[ \t]{0,20}\w{1,20}[ \t]{0,20})?[:=][ \t]{0,20}"
IN_CODE = re.compile(
    rf"({_GIVEN}\w?['\"])[^'\"\n]{{{SHORTEST},}}|({_GIVEN})(?=[A-Za-z0-9+/_-]{{0,200}}?\d)[A-Za-z0-9+/=_-]{{16,}}(?![\w.(\[])",
    re.IGNORECASE,
)
# tokens that show by their form what they are, and private keys
IN_ITSELF = re.compile(
    r"\b(?:hf_\w{20,}|sk-[\w-]{20,}|gh[pousr]_\w{30,}|github_pat_\w{20,}|glpat-[\w-]{20,}|(?:AKIA|ASIA)[0-9A-Z]{16}"
    r"|xox[abprs]-[\w-]{10,}|AIza[\w-]{35}|(?<![\w-])eyJ[\w-]{10,}\.[\w-]+\.[\w-]+|(?<=Bearer )[\w.~+/-]{16,})"
    r"|-----BEGIN [A-Z ]{0,30}PRIVATE KEY-----.*?(?:-----END[^\n]*|\Z)",
    re.DOTALL,
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


def hide_in_code(text: str) -> str:
    """Redact also what looks like a secret in a text that the configuration's checks have not seen: a diff of code."""
    text = IN_ITSELF.sub(HIDDEN, text)
    text = IN_CODE.sub(lambda found: (found[1] or found[2]) + HIDDEN, text)
    for value in secrets().values():  # a key of several lines has a sign before each of them
        for line in value.splitlines()[:200] if "\n" in value else ():
            text = text.replace(line.strip(), HIDDEN) if len(line.strip()) >= 2 * SHORTEST else text
    return hide(text)


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
