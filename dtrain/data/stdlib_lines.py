"""Lines of the running Python's standard library, and what each is: code, comment or docstring. No download."""

from __future__ import annotations

import ast
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from dtrain.data import stdlib, text
from dtrain.data.corpus import hash_share
from dtrain.data.labelled import Labelled, Record, check_length, marks_of, split

TASK = "classify"  # what the targets are (dtrain/validate.py)

LABELS = ["code", "comment", "docstring"]
SHARE_OF_FILES = 0.25  # of the modules at the top: so the lines are found in about a second
SHORTEST = 12  # characters; many a shorter line is like none of the three, or like all


def check(seq_len: int, pad_id: int | None, **rest: Any) -> dict[str, int]:
    """Refuse a Python that came without its sources, and settings that cannot work; what the model must have."""
    stdlib.check()
    check_length(seq_len, pairs=False)
    return {"vocab_size": marks_of(None, pad_id).vocab_size, "num_classes": len(LABELS)}


def lines_of(source: str) -> Iterator[tuple[str, str]]:
    """(line, what it is): without the marks that would give it away, and without lines that are of two kinds."""
    strings: set[int] = set()  # lines of docstrings, and of other strings over several lines
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            docstring = ast.get_docstring(node)
            if docstring is not None:
                strings.update(range(node.body[0].lineno, (node.body[0].end_lineno or 0) + 1))
                for line in docstring.split("\n"):
                    if not line.lstrip().startswith((">>>", "...")):  # code, in a docstring
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
    """Equally many lines of each kind, each of them once; a tenth is held out, by a hash of the line.

    Who always guesses one class is right in a third of the cases. Some comments are code that was switched off, and
    some docstrings read like comments: nobody is right in all.
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
    """A file of the library; what few are not in UTF-8 would say nothing else to a model of bytes."""
    return file.read_text("utf-8", errors="replace").replace("\r\n", "\n")
