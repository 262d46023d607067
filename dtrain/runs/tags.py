"""Tags and notes on a run: words to find it by, and sentences for people. In RUN/tags.json, apart from its settings."""

from __future__ import annotations

import re
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from dtrain.config.redaction import hide
from dtrain.errors import bad
from dtrain.runs.folder import read_json, write_json
from dtrain.util.format import as_dict, clean

FILE = "tags.json"
TAG = re.compile(r"[^\W_][\w.+-]{0,63}")
MOST_TAGS, MOST_NOTES, LONGEST_NOTE = 64, 200, 2000


def tags_of(run_dir: Path) -> list[str]:
    found = read_json(run_dir / FILE).get("tags")
    return [tag for tag in found if isinstance(tag, str) and TAG.fullmatch(tag)] if isinstance(found, list) else []


def notes_of(run_dir: Path) -> list[tuple[str, str]]:
    """Return (time, text) of each note, oldest first."""
    found = read_json(run_dir / FILE).get("notes")
    notes = [as_dict(note) for note in found] if isinstance(found, list) else []
    return [(clean(str(note.get("time"))), clean(str(note.get("text")))) for note in notes[-MOST_NOTES:]]


def check(words: Iterable[str], setting: str = "tags") -> list[str]:
    words = list(words)
    for word in words:
        if not TAG.fullmatch(word):
            near = re.sub(r"[^\w.+-]+", "-", word).strip("-_.+")[:64] or "good"
            raise bad(setting, word, "a tag is one word of letters, digits and -_.+, at most 64 of them", near)
    if len(words) > MOST_TAGS:
        raise bad(setting, f"{len(words)} tags", f"a run has at most {MOST_TAGS}", "fewer of them")
    return words


def change(run_dir: Path, add: Iterable[str] = (), remove: Iterable[str] = ()) -> list[str]:
    """Add and remove tags; return those of the run now."""
    gone = set(remove)
    found = [tag for tag in dict.fromkeys([*tags_of(run_dir), *check(add)]) if tag not in gone]
    _write(run_dir, {"tags": check(found)})
    return found


def note(run_dir: Path, text: str) -> None:
    if not text.strip() or len(text) > LONGEST_NOTE:
        raise bad("TEXT", text, f"a note has 1 to {LONGEST_NOTE} characters", 'dtrain runs note RUN "diverged at 300"')
    found = read_json(run_dir / FILE).get("notes")
    line = {"time": time.strftime("%Y-%m-%d %H:%M"), "text": hide(clean(text))}
    _write(run_dir, {"notes": [*(found if isinstance(found, list) else []), line][-MOST_NOTES:]})


def _write(run_dir: Path, values: dict[str, Any]) -> None:
    write_json(run_dir / FILE, {**read_json(run_dir / FILE), **values})
