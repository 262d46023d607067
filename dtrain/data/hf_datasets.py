"""Folders written by save_to_disk of Hugging Face `datasets`: a Dataset, or a DatasetDict with splits."""

from __future__ import annotations

import os
from collections.abc import Iterator
from functools import cached_property
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from dtrain.data import token_stream
from dtrain.data.token_stream import Piece
from dtrain.formats.bounded import read_json

HELD_OUT = ("validation", "valid", "val", "dev", "test")  # the first that exists is the validation split
ROWS = 100  # per read
LARGEST_JSON = 2**26  # bytes of its description, which has some dozen per shard


def is_saved(path: Path) -> bool:
    return (path / "dataset_dict.json").is_file() or all(
        (path / name).is_file() for name in ("dataset_info.json", "state.json")
    )


def splits(path: Path) -> dict[str, Path]:
    """Return the folder of "train", and of "val" if there is a held-out split."""
    if not (path / "dataset_dict.json").is_file():
        return {"train": path}
    names = _described(path, "dataset_dict.json", "splits", list)
    if "train" not in names:
        others = [str(name)[:40] for name in names[:10]]
        raise ValueError(
            f"data.path={str(path)!r} has no split named train, only {', '.join(others) or 'none'}\n  fix: "
            f"data.path={path / others[0] if others else '…'}"
        )
    held_out = [name for name in HELD_OUT if name in names]
    return {"train": path / "train"} | ({"val": path / held_out[0]} if held_out else {})


def _described(folder: Path, file: str, key: str, kind: type) -> Any:
    """Return one entry of a JSON file in the folder."""
    try:
        value = read_json(folder / file, LARGEST_JSON)[key]
        if not isinstance(value, kind):
            raise TypeError(f"{key} is not a {kind.__name__}")
    except (OSError, KeyError, TypeError, ValueError) as error:
        raise ValueError(f"data.path={str(folder)!r} is damaged ({file}: {error!r})\n  fix: save it again") from error
    return value


def data_files(folder: Path) -> list[Path]:
    """Return the tables of a split, which must all be in its folder."""
    entries = _described(folder, "state.json", "_data_files", list)
    names = [str(entry.get("filename")) if isinstance(entry, dict) else "" for entry in entries]
    missing = [name for name in names if Path(name).name != name or not os.path.isfile(folder / name)]
    if missing:
        raise ValueError(f"data.path={str(folder)!r} lacks {missing[0][:80]}\n  fix: copy the folder again")
    return [folder / name for name in names]


def check(path: Path, field: str, setting: str = "data.path") -> None:
    """Refuse a folder that is incomplete or has no such column; reads only its JSON files, and imports nothing."""
    if find_spec("pyarrow") is None:
        raise ValueError(
            f"{setting}={str(path)!r} was saved by the datasets package, which is not installed\n  fix: "
            "pip install 'dtrain[datasets]', or write it as .jsonl"
        )
    for folder in splits(path).values():
        columns = _described(folder, "dataset_info.json", "features", dict)
        data_files(folder)
        if not _is_text(columns.get(field)):
            texts = [name for name, kind in columns.items() if _is_text(kind)]
            named = ", ".join(name[:40] for name in list(columns)[:20])
            raise ValueError(
                f"data.field={field!r} is not a text column of {str(folder)!r}, which has {named}\n"
                f"  fix: data.field={texts[0][:40] if texts else '…'}"
            )


def _is_text(kind: Any) -> bool:
    return isinstance(kind, dict) and "string" in str(kind.get("dtype"))  # string, large_string


class Saved:
    """Each row is a document. Without a validation split, a hash of the text decides which rows are held out."""

    def __init__(self, path: Path, field: str, val_fraction: float) -> None:
        check(path, field)
        self.field, self.val_fraction = field, val_fraction
        self.splits = splits(path)

    @cached_property
    def split(self) -> token_stream.TextSplit:
        return token_stream.TextSplit(self.texts("train"), self.val_fraction)

    @property
    def cuts_tail(self) -> bool:
        return "val" not in self.splits and self.split.cuts_tail

    def pieces(self, split: str) -> Iterator[Piece]:
        named = "val" in self.splits
        folder = self.splits[split if named else "train"]
        for text in self.texts(split if named else "train"):
            if named or self.split.holds_out(text) == (split == "val"):
                yield from token_stream.text_pieces(text, folder)

    def texts(self, split: str) -> Iterator[bytes]:
        """Yield every non-empty text of a split."""
        number = 0
        for file in data_files(self.splits[split]):
            for rows in _rows(file, self.field):
                for text in rows:
                    if text is None:
                        raise ValueError(
                            f"row {number} of {str(self.splits[split])!r} has no text in data.field={self.field!r}\n"
                            "  fix: remove such rows with Dataset.filter, and save it again"
                        )
                    number += 1
                    if text:
                        yield text.encode()


def _rows(file: Path, field: str) -> Iterator[list[str | None]]:
    """Yield the texts of a table in batches. The file is validated: offsets outside of it would crash Python."""
    import pyarrow as pa

    try:
        with pa.memory_map(str(file)) as source, pa.ipc.open_stream(source) as table:
            for batch in table:
                column = batch.column(field)
                if not (pa.types.is_string(column.type) or pa.types.is_large_string(column.type)):
                    raise TypeError(f"{field} is {column.type}")
                column.validate(full=True)
                for start in range(0, len(column), ROWS):
                    yield column.slice(start, ROWS).to_pylist()
    except (pa.ArrowException, OSError, KeyError, TypeError, UnicodeError) as error:
        why = str(error)[:200]
        raise ValueError(f"document {str(file)!r} cannot be read ({why})\n  fix: copy the folder again") from error
