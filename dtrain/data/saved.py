"""Folders that Hugging Face `datasets` has written with save_to_disk: a Dataset, or a DatasetDict with splits."""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import cached_property
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from dtrain.data import corpus
from dtrain.data.corpus import Piece

HELD_OUT = ("validation", "valid", "val", "dev", "test")  # a split by the first of these names is for validation
ROWS = 100  # read at a time


def is_saved(path: Path) -> bool:
    return (path / "dataset_dict.json").is_file() or all(
        (path / name).is_file() for name in ("dataset_info.json", "state.json")
    )


def splits(path: Path) -> dict[str, Path]:
    """Where "train" is, and "val" if a split is held out already."""
    if not (path / "dataset_dict.json").is_file():
        return {"train": path}
    names = json.loads((path / "dataset_dict.json").read_text())["splits"]
    if "train" not in names:
        raise ValueError(
            f"data.path={str(path)!r} has no split named train, only {', '.join(names) or 'none'}\n  fix: "
            f"data.path={path / names[0] if names else '…'}"
        )
    held_out = [name for name in HELD_OUT if name in names]
    return {"train": path / "train"} | ({"val": path / held_out[0]} if held_out else {})


def check(path: Path, field: str, setting: str = "data.path") -> None:
    """Refuse a folder that is torn or has no such column; reads its JSON files, and imports nothing."""
    if find_spec("datasets") is None:
        raise ValueError(
            f"{setting}={str(path)!r} was saved by the datasets package, which is not installed\n  fix: "
            "pip install 'dtrain[datasets]', or write it as .jsonl"
        )
    try:
        for folder in splits(path).values():
            columns = json.loads((folder / "dataset_info.json").read_text())["features"]
            files = json.loads((folder / "state.json").read_text())["_data_files"]
            missing = [file["filename"] for file in files if not (folder / file["filename"]).is_file()]
            if missing:
                raise ValueError(f"{setting}={str(folder)!r} lacks {missing[0]}\n  fix: copy the folder again")
            if "string" not in str(columns.get(field, {}).get("dtype")):  # string, large_string
                texts = [name for name, kind in columns.items() if "string" in str(kind.get("dtype"))]
                raise ValueError(
                    f"data.field={field!r} is no column of text in {str(folder)!r}, which has {', '.join(columns)}\n"
                    f"  fix: data.field={texts[0] if texts else '…'}"
                )
    except (OSError, KeyError, TypeError, AttributeError, json.JSONDecodeError) as error:
        raise ValueError(f"{setting}={str(path)!r} is torn ({error!r})\n  fix: save it again") from error


class Saved:
    """Each row is a document. Without a split that is held out for validation, some are, by a hash of their texts."""

    def __init__(self, path: Path, field: str, val_fraction: float) -> None:
        check(path, field)
        self.field, self.val_fraction = field, val_fraction
        self.splits = splits(path)

    @cached_property
    def split(self) -> corpus.TextSplit:
        return corpus.TextSplit(self.texts("train"), self.val_fraction)

    @property
    def cuts_tail(self) -> bool:
        return "val" not in self.splits and self.split.cuts_tail

    def pieces(self, split: str) -> Iterator[Piece]:
        named = "val" in self.splits
        folder = self.splits[split if named else "train"]
        for text in self.texts(split if named else "train"):
            if named or self.split.holds_out(text) == (split == "val"):
                yield from corpus.text_pieces(text, folder)

    def texts(self, split: str) -> Iterator[bytes]:
        """Every text of a split that is not empty."""
        import datasets

        rows: Any = datasets.load_from_disk(str(self.splits[split]))
        rows = rows.select_columns([self.field]).with_format(None)
        number = 0
        for batch in rows.iter(batch_size=ROWS):
            for text in batch[self.field]:
                if text is None:
                    raise ValueError(
                        f"row {number} of {str(self.splits[split])!r} has no text in data.field={self.field!r}\n"
                        "  fix: take such rows out with Dataset.filter, and save it again"
                    )
                number += 1
                if text:
                    yield text.encode()
