"""Quote values for Hydra's override grammar, so that paths and program arguments are read as they are."""

from __future__ import annotations

import re
from pathlib import Path

from dtrain.errors import bad


def quote(path: Path | str) -> str:
    """Return a path as a quoted Hydra value, so that spaces, commas and equals signs are literal.

    In Hydra a backslash is an escape only before a quote.
    """
    return "'" + re.sub(r"(\\*)('|\Z)", lambda m: m[1] * 2 + m[2].replace("'", "\\'"), str(path)) + "'"


def unquoted(value: str) -> str:
    """Return a Hydra value without its quotes: the printed commands quote a folder like 0-optim.lr=0.1."""
    if len(value) < 2 or value[0] not in "'\"" or value[-1] != value[0]:
        return value
    return re.sub(rf"(\\+)({value[0]}|\Z)", lambda m: m[1][: len(m[1]) // 2] + m[2], value[1:-1])


def quoted_list(items: list[str]) -> str:
    return f"[{','.join(map(quote, items))}]"


def check_path(key: str, path: Path) -> None:
    """Reject a folder that was found, not typed, if Hydra would interpolate a part of its name."""
    if "${" in str(path):
        raise bad(key, path, "Hydra would interpolate ${ in the folder's name", "rename the folder")
