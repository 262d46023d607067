"""Lines of the running Python's standard library, labelled as code, comment or docstring. No download."""

from __future__ import annotations

import ast
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from dtrain.data import stdlib, text
from dtrain.data.text_classification import Labelled, Record, check_length, marks_of, split
from dtrain.data.token_stream import hash_share

TASK = "classify"  # the kind of targets (dtrain/checks/validate.py)

LABELS = ["code", "comment", "docstring"]
SHARE_OF_FILES = 0.25  # of the top-level modules: reading them takes about a second
SHORTEST = 12  # characters; many shorter lines fit none of the three kinds, or all


def check(seq_len: int, pad_id: int | None, **rest: Any) -> dict[str, int]:
    """Refuse a Python without its sources, and settings that cannot work; return the model's required settings."""
    stdlib.check()
    check_length(seq_len, pairs=False)
    return {"vocab_size": marks_of(None, pad_id).vocab_size, "num_classes": len(LABELS)}


def lines_of(source: str) -> Iterator[tuple[str, str]]:
    """Yield (line, kind), without the marks that reveal the kind, and without lines of two kinds."""
    strings: set[int] = set()  # lines of docstrings and of other multi-line strings
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            docstring = ast.get_docstring(node)
            if docstring is not None:
                strings.update(range(node.body[0].lineno, (node.body[0].end_lineno or 0) + 1))
                for line in docstring.split("\n"):
                    if not line.lstrip().startswith((">>>", "...")):  # code inside a docstring
                        yield line.strip(), "docstring"
        elif isinstance(node, (ast.Constant, ast.JoinedStr)) and node.lineno != node.end_lineno:
            strings.update(range(node.lineno, (node.end_lineno or 0) + 1))
    for number, line in enumerate(source.split("\n"), 1):
        if number in strings:
            continue
        line = line.strip()
        if line.startswith("#"):
            yield line.strip("#!: \t"), "comment"
        elif "#" not in line:
            yield line, "code"


class Lines(Labelled):
    """Equally many distinct lines of each kind; a tenth is held out, by a hash of the line.

    Always guessing one class is right a third of the time. Some comments are disabled code, and some docstrings read
    like comments: no model can get all right.
    """

    def __init__(self, seq_len: int, pad_id: int | None, val_fraction: float = 0.1) -> None:
        check(seq_len, pad_id)
        self._splits = split(self.records(), val_fraction)
        self._prepare(seq_len, text.ByteTokenizer(), marks_of(None, pad_id))

    @staticmethod
    def records() -> list[Record]:
        kinds: dict[str, set[str]] = {}
        for file in sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py")):
            if hash_share(file.name) < SHARE_OF_FILES:
                for line, kind in lines_of(read(file)):
                    if len(line) >= SHORTEST and "\0" not in line:
                        kinds.setdefault(line, set()).add(kind)
        of_kind = {label: [line for line, found in kinds.items() if found == {label}] for label in LABELS}
        count = min(map(len, of_kind.values()))
        return [
            Record(line, None, label)
            for label, lines in of_kind.items()
            for line in sorted(lines, key=hash_share)[:count]
        ]


def read(file: Path) -> str:
    """Read a file of the library; decoding errors in the few non-UTF-8 files do not matter for a model of bytes."""
    return file.read_text("utf-8", errors="replace").replace("\r\n", "\n")
