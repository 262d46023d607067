"""User-facing errors in one format: the setting, its value, the rule, a fix. Imports nothing from dtrain."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Iterator
from typing import Any

RENAMED = {"train.check_replicas_every": "guard.replicas_every"}
LONGEST = 400  # longest value, in characters, that a message repeats


def bad(key: str, value: Any, rule: str, fix: str) -> ValueError:
    """Format every message about a setting: the setting, its value, the rule, a fix."""
    text = "null" if value is None else str(value)
    return ValueError(f"{key}={text if len(text) <= LONGEST else text[:LONGEST] + '…'}: {rule}\n  fix: {fix}")


def unknown(key: str, known: Iterable[str]) -> ValueError:
    if key in RENAMED:
        return ValueError(f"{key}: has another name now\n  fix: {RENAMED[key]}=…")
    known = sorted(known)
    leaf = key.rpartition(".")[2]
    near = [k for k in known if k.rpartition(".")[2] == leaf]  # lr is meant as optim.lr, not as logger
    near += [k for k in difflib.get_close_matches(key, known, 3, 0.5) if k not in near]
    if near:
        return ValueError(f"{key}: there is no such setting\n  fix: did you mean {' or '.join(near)}?")
    section = key.rpartition(".")[0]
    siblings = [k for k in known if k.rpartition(".")[0] == section] or known
    return ValueError(f"{key}: there is no such setting\n  fix: use one of {', '.join(siblings)}")


class CheckpointError(RuntimeError):
    """A checkpoint could not be saved or used; the message says which, why, and how to fix it."""


def chain(error: BaseException | None) -> Iterator[BaseException]:
    """Yield the error and its causes."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        yield error
        error = error.__cause__ or error.__context__
