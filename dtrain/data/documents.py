"""Sources of documents: text files, JSON lines, or a folder saved by Hugging Face `datasets`."""

from __future__ import annotations

import itertools
import json
import os
from collections import Counter
from collections.abc import Iterable, Iterator
from fnmatch import fnmatchcase
from functools import cached_property
from pathlib import Path, PurePath
from typing import Protocol

from dtrain.data import hf_datasets, token_stream
from dtrain.data.files import UNREADABLE, json_lines, parse_line, reading, walk
from dtrain.data.token_stream import Piece

TEXT = "**/*.txt"
JSON_LINES = ("**/*.jsonl", "**/*.jsonl.gz")
HOW_TO = "give a text file, a .jsonl file, a folder of them, or a folder saved by datasets"


class Source(Protocol):
    """Documents in an order that is the same on all machines; whole documents are held out if there are enough."""

    @property
    def cuts_tail(self) -> bool:
        """Too few documents to hold out whole ones: pieces("train") has all, and validation uses its tail."""

    def pieces(self, split: str) -> Iterator[Piece]:
        """Yield the documents of "train" or "val", long ones in parts."""


class Files:
    """Each file is a document; a hash of the relative path decides which are held out."""

    def __init__(self, root: Path, names: list[str], val_fraction: float) -> None:
        self.root, self.names = root, names
        train, val = token_stream.split_documents(names, val_fraction)
        self.cuts_tail = not val
        self.splits = {"train": train, "val": val}

    def pieces(self, split: str) -> Iterator[Piece]:
        return itertools.chain.from_iterable(token_stream.read_pieces(self.root / name) for name in self.splits[split])


class JsonLines:
    """Each line of each file is a document; a hash of the text decides which are held out."""

    def __init__(self, files: list[Path], field: str, val_fraction: float) -> None:
        self.files, self.field, self.val_fraction = files, field, val_fraction

    @cached_property
    def split(self) -> token_stream.TextSplit:
        return token_stream.TextSplit((text for text, _ in self.texts()), self.val_fraction)

    @property
    def cuts_tail(self) -> bool:
        return self.split.cuts_tail

    def pieces(self, split: str) -> Iterator[Piece]:
        for text, place in self.texts():
            if self.split.holds_out(text) == (split == "val"):
                yield from token_stream.text_pieces(text, place)

    def texts(self) -> Iterator[tuple[bytes, Path]]:
        """Yield every non-empty text and its file; refuse a line that is not such a document."""
        for file in self.files:
            for number, line in _lines(file):
                if line.strip() and (text := document(line, self.field, f"{str(file)!r} line {number}")):
                    yield text, file


def document(line: bytes, field: str, place: str) -> bytes:
    """Return the text of one JSON line, as UTF-8."""
    try:
        value = parse_line(line)
    except (ValueError, RecursionError) as error:
        # the error's own text says "line 1", which is not the file's line number
        reason = f"{error.msg}, at character {error.pos + 1}" if isinstance(error, json.JSONDecodeError) else error
        raise ValueError(f"{place} is not JSON ({reason})\n  fix: one object a line, as json.dumps writes it") from None
    if not isinstance(value, dict):
        kind = type(value).__name__
        raise ValueError(f"{place} is not a JSON object but a {kind}\n  fix: write {{{json.dumps(field)}: …}}")
    if field not in value:
        others = [name for name in value if isinstance(value[name], str)]
        fix = f"data.field={others[0]}" if others else f"write {{{json.dumps(field)}: …}}"
        raise ValueError(f"{place} has no field {field!r}, only {_some(value) or 'none'}\n  fix: {fix}")
    if not isinstance(value[field], str):
        kind = type(value[field]).__name__
        raise ValueError(
            f"{place} has a {kind} in data.field={field!r}, not text\n  fix: remove the line, or correct it"
        )
    try:
        return value[field].encode()
    except UnicodeEncodeError:
        raise ValueError(
            f"{place} has half of a surrogate pair in {field!r}, which is not a character\n  fix: correct the text"
        ) from None


def _some(names: Iterable[str]) -> str:
    """Only a few names: a line may have a million."""
    return ", ".join(name[:40] for name in itertools.islice(names, 10))


def _lines(file: Path) -> Iterator[tuple[int, bytes]]:
    try:
        yield from json_lines(file)
    except UNREADABLE as error:
        reason = getattr(error, "strerror", None) or error
        raise ValueError(f"document {str(file)!r} cannot be read ({reason})\n  fix: copy it again") from error


# ---- which kind of source a path is ----------------------------------------------------------------------------


def is_json_lines(file: Path) -> bool:
    return file.name.endswith((".jsonl", ".jsonl.gz"))


def list_files(root: Path, pattern: str) -> Iterator[Path]:
    """Yield files under root that match, including dangling links, so that reading those fails loudly.

    `**` follows linked folders, which Path.glob does not (and could only from Python 3.13 on).
    """
    parts = PurePath(pattern).parts
    if "**" in parts and ".." not in parts and not PurePath(pattern).is_absolute():
        for folder, files in walk(root):
            inside = PurePath(folder).parts
            yield from (root.joinpath(*inside, name) for name in files if _matches((*inside, name), parts))
        return
    try:
        yield from (path for path in root.glob(pattern) if not path.is_dir())
    except (ValueError, NotImplementedError) as error:  # empty or absolute pattern
        raise ValueError(f"data.pattern={pattern!r} must be a relative glob ({error})\n  fix: '**/*.txt'") from error


def _matches(path: tuple[str, ...], pattern: tuple[str, ...]) -> bool:
    """Return whether a path matches a glob, part by part, like Path.glob: `**` is any number of folders."""
    if not pattern:
        return not path
    if pattern[0] == "**":
        return len(pattern) > 1 and any(_matches(path[i:], pattern[1:]) for i in range(len(path)))
    return bool(path) and fnmatchcase(path[0], pattern[0]) and _matches(path[1:], pattern[1:])


def patterns(root: Path, pattern: str | None, setting: str = "data.path") -> tuple[str, ...]:
    """Return the pattern, or without one those for the kind of files in the folder."""
    if pattern is not None:
        return (pattern,)
    json_lines = tuple(p for p in JSON_LINES if any(list_files(root, p)))
    if not json_lines:
        return (TEXT,)
    if any(list_files(root, TEXT)):
        raise ValueError(
            f"{setting}={str(root)!r} has both .txt and .jsonl files, and only one kind is read\n  fix: "
            f"data.pattern='{TEXT}' or data.pattern='{json_lines[0]}'"
        )
    return json_lines


def check(path: str, pattern: str | None, field: str, setting: str = "data.path") -> None:
    """Refuse a path without documents. Reads the start of one file; of JSON lines, the first line."""
    root = Path(path).expanduser()
    value = f"{setting}={str(path)!r}"
    if not os.path.exists(root):
        raise ValueError(f"{value} does not exist\n  fix: {HOW_TO}")
    if not os.access(root, os.R_OK):
        raise ValueError(f"{value} cannot be read by this user\n  fix: change its permissions")
    if not root.is_file() and not root.is_dir():  # opening it might block forever
        raise ValueError(f"{value} is neither a file nor a folder\n  fix: {HOW_TO}")
    if pattern is None and hf_datasets.is_saved(root):
        return hf_datasets.check(root, field, setting)
    if root.is_dir() and {"meta.json", "train.bin"} <= set(os.listdir(root)):
        raise ValueError(f"{value} is a folder of tokens, not of text\n  fix: data=tokens")
    if root.is_file():
        files: Iterable[Path] = [root]
    else:
        files = itertools.chain.from_iterable(list_files(root, p) for p in patterns(root, pattern, setting))
    first, num_bytes = None, 0
    for file in files:
        first, num_bytes = first or file, file.lstat().st_size
        if num_bytes:  # one non-empty file is enough
            break
    if first is None:
        raise ValueError(f"{value} has no file that matches data.pattern={pattern or TEXT!r}\n  fix: {_other(root)}")
    if not num_bytes:
        raise ValueError(f"{value} is empty\n  fix: give a file or folder with text in it")
    if is_json_lines(file):
        next(JsonLines([file], field, 0.5).texts(), None)
    else:
        with reading(file):
            pass


def _other(root: Path) -> str:
    """Return a fix for a folder whose files are of an unexpected kind."""
    suffixes = Counter(path.suffix for path in itertools.islice(list_files(root, "**/*"), 1000) if path.suffix)
    if not suffixes:
        return "another data.path" if any(root.iterdir()) else "another data.path: the folder is empty"
    return f"its files are {', '.join(suffixes)}: data.pattern='**/*{suffixes.most_common(1)[0][0]}', or another path"


def open_source(path: Path, pattern: str | None, field: str, val_fraction: float) -> Source:
    """Return the documents of a path that `check` has accepted."""
    if pattern is None and hf_datasets.is_saved(path):
        return hf_datasets.Saved(path, field, val_fraction)
    if path.is_file():
        root, files = path.parent, [path]
    else:
        root = path
        files = [file for p in patterns(path, pattern) for file in list_files(path, p)]
    names = sorted(file.relative_to(root).as_posix() for file in files)
    kinds = {is_json_lines(file) for file in files}
    if kinds == {True, False}:
        raise ValueError(
            f"data.pattern={pattern!r} matches .jsonl files and others, and only one kind is read\n  fix: "
            f"data.pattern='{JSON_LINES[0]}', or one that leaves them out"
        )
    if kinds == {True}:
        return JsonLines([root / name for name in names], field, val_fraction)
    return Files(root, names, val_fraction)
