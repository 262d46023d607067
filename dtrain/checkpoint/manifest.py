"""manifest.json of a checkpoint: its content, parsed as untrusted input.

The manifest has the step, the non-tensor state, every file with its size and sha256, and for every tensor its shape,
dtype and layout (layouts.py): O(tensors + ranks). Each file's header maps its keys to boxes. The first format,
`dtrain-1`, listed every box here; it can be read but is no longer written.

A checksum only finds accidental damage. So everything is checked before use: types, sizes and counts, names that stay
in the folder, regular files, and that each tensor is covered exactly once. This file does not import torch.
"""

from __future__ import annotations

import functools
import hashlib
import json
import math
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from io import BufferedReader
from pathlib import Path
from typing import Any

from dtrain.checkpoint import layouts
from dtrain.checkpoint.layouts import Box, Ints, Layout
from dtrain.errors import CheckpointError
from dtrain.formats.bounded import parse_json
from dtrain.util.regular_file import NotRegular, open_regular

FORMAT, OLD_FORMAT = "dtrain-2", "dtrain-1"
FILE_NAME = re.compile(r"rank-(\d{5,7})(-\d{1,3})?\.safetensors")
ITEM_BYTES = {
    "float64": 8, "float32": 4, "float16": 2, "bfloat16": 2, "int64": 8, "int32": 4, "int16": 2, "int8": 1, "uint8": 1,
    "bool": 1,
}  # fmt: skip
# A manifest of the first format had up to 300 kB per file that a rank wrote; the current one has far less.
BASE_BYTES, BYTES_PER_FILE = 32 * 2**20, 2**20
MAX_FILES = 2**20
MAX_IRREGULAR = 2**16  # total boxes in layouts of kind "boxes": every pair of a tensor is compared


class Damaged(CheckpointError):
    """The checkpoint is not what was saved: other bytes, or content that no save writes."""


@dataclass(frozen=True)
class Part:
    """A box of a tensor in a file."""

    file: str
    key: str
    offset: Ints
    shape: Ints


@dataclass(frozen=True)
class Tensor:
    """A saved tensor, and who wrote which part of it. `parts`: only in the first format, which lists them."""

    shape: Ints
    dtype: str
    layout: Layout
    parts: tuple[Part, ...] | None = None


@dataclass(frozen=True)
class Manifest:
    """The checked content of manifest.json. `manifest["samples"]` reads the non-tensor state."""

    meta: dict[str, Any]
    files: dict[str, dict[str, Any]]
    tensors: dict[str, Tensor]
    is_old: bool = False

    def __getitem__(self, key: str) -> Any:
        return self.meta[key]

    @functools.cached_property
    def files_of(self) -> dict[int, list[str]]:
        """Return the files that each rank wrote."""
        found: dict[int, list[str]] = {}
        for name in sorted(self.files):
            found.setdefault(rank_of(name), []).append(name)
        return found


def rank_of(file: str) -> int:
    match = FILE_NAME.fullmatch(file)
    assert match, file
    return int(match[1])


# ---- write ---------------------------------------------------------------------------------------------------


def content(step: int, meta: dict[str, Any], files: dict[str, Any], index: dict[str, Any]) -> dict[str, Any]:
    return {"format": FORMAT, "step": step, **meta, "files": files, **index}


def write(folder: Path, values: dict[str, Any]) -> None:
    """Write manifest.json, flushed to the disk."""
    with open(folder / "manifest.json", "w") as file:
        file.write(json.dumps(values | {"sha256": checksum(values)}))  # json.dump is slower
        file.flush()
        os.fsync(file.fileno())


def checksum(values: dict[str, Any]) -> str:
    body = {k: v for k, v in values.items() if k != "sha256"}
    return hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()


# ---- read ----------------------------------------------------------------------------------------------------


@contextmanager
def regular(path: Path) -> Iterator[BufferedReader]:
    """Open a checkpoint's file for reading. A disk that does not respond raises OSError, not Damaged."""
    try:
        file = open_regular(path, follow_symlinks=False)
    except NotRegular as error:
        raise Damaged(f"{path.name}: {error.strerror}") from error
    except (FileNotFoundError, NotADirectoryError) as error:
        raise Damaged(f"{path.name} is missing") from error
    with file:
        yield file


def drop_cached_pages(file: BufferedReader) -> None:
    """Make the next read of a file come from the disk."""
    if hasattr(os, "posix_fadvise"):
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def read(path: Path) -> Manifest:
    """Read a checkpoint folder's manifest from the disk. Raise Damaged if it is not what a save writes."""
    with regular(path / "manifest.json") as file:
        drop_cached_pages(file)
        size = os.fstat(file.fileno()).st_size
        num_files = 0 if size <= BASE_BYTES else sum(1 for name in os.listdir(path) if FILE_NAME.fullmatch(name))
        if size > BASE_BYTES + num_files * BYTES_PER_FILE:
            raise Damaged(f"manifest.json has {size} bytes for {num_files} files, more than any save writes")
        data = file.read(size)
    try:
        values = parse_json(data, most_objects=max(2**20, size // 64), most_values=max(2**22, size // 8))
    except ValueError as error:  # not JSON, not even text, or nested too deeply
        raise Damaged(f"manifest.json is not readable: {error}") from error
    if not isinstance(values, dict):
        raise Damaged("manifest.json is not an object")
    name = values.get("format")
    newer = isinstance(name, str) and re.fullmatch(r"dtrain-\d{1,4}", name) and name not in (FORMAT, OLD_FORMAT)
    try:
        if values.get("sha256") != checksum(values):
            raise Damaged("manifest.json does not match its checksum")
        if newer:
            raise CheckpointError(f"{path} has the format {name}, this version of dtrain reads {FORMAT}")
        return parse(values)
    except (ValueError, RecursionError, OverflowError) as error:  # LayoutError is a ValueError
        raise Damaged(f"manifest.json: {error}") from error


def parse(values: dict[str, Any]) -> Manifest:
    """Check a manifest's values; raise Damaged or LayoutError if they are not what a save writes."""
    expect(values.get("format") in (FORMAT, OLD_FORMAT), "format is unknown")
    expect(is_count(values.get("step")), "step is not a whole number")
    check_meta(values)
    files = check_files(values.get("files"))
    specs: Any = values.get("tensors")
    expect(isinstance(specs, dict), "tensors is not an object")
    listed: Any = values.get("layouts")
    is_old = values["format"] == OLD_FORMAT
    known: dict[tuple[int, Ints], Layout] = {}
    writers = {rank_of(file) for file in files}
    irregular = 0
    tensors: dict[str, Tensor] = {}
    total = 0
    for name, spec in specs.items():
        expect(isinstance(spec, dict) and 0 < len(name) <= 1024, f"tensor {name!r:.80} is not an object")
        shape = layouts.ints(spec.get("shape"))
        dtype = spec.get("dtype")
        expect(len(shape) <= layouts.MAX_DIMS, f"{name} has {len(shape)} dimensions")
        expect(isinstance(dtype, str) and dtype in ITEM_BYTES, f"{name} has the unknown dtype {dtype!r:.40}")
        total += math.prod(shape) * ITEM_BYTES[dtype]
        if is_old:
            parts = check_parts(name, spec.get("chunks"), files)
            pieces = [(rank_of(p.file), p.offset, p.shape) for p in parts if 0 not in p.shape]
            expect(pieces, f"{name} has no chunks")
            tensors[name] = Tensor(shape, dtype, layouts.of(shape, pieces), tuple(parts))
        else:
            number = spec.get("layout")
            expect(isinstance(listed, list) and is_count(number) and number < len(listed), f"{name} has no layout")
            if (number, shape) not in known:
                known[number, shape] = layout = layouts.parse(listed[number], shape, MAX_FILES)
                expect(writers.issuperset(layout.ranks), f"{name} was written by a rank without files")
                irregular += len(layout.boxes)
                expect(irregular <= MAX_IRREGULAR, "too many irregular shards")
            tensors[name] = Tensor(shape, dtype, known[number, shape])
    expect(total <= sum(f["size"] for f in files.values()), "the tensors are larger than the files")
    reserved = {"format", "files", "tensors", "layouts", "sha256"}
    return Manifest({k: v for k, v in values.items() if k not in reserved}, files, tensors, is_old)


def check_meta(values: dict[str, Any]) -> None:
    """Check the types of the non-tensor state that is present."""
    for key in ("samples", "world_size"):
        expect(key not in values or is_count(values[key]), f"{key} is not a whole number")
    for key in ("data", "config_sha256", "run"):
        expect(isinstance(values.get(key, ""), (str, type(None))), f"{key} is not a string")
    for key in ("mesh", "choices", "extra", "spikes", "hooks", "metrics", "stream"):
        expect(isinstance(values.get(key, {}), dict), f"{key} is not an object")
    classes = values.get("classes", [])
    expect(isinstance(classes, list) and all(isinstance(c, str) for c in classes), "classes are not names")
    tied, transient = values.get("tied", {}), values.get("transient", [])
    expect(isinstance(tied, dict) and all(isinstance(name, str) for name in tied.values()), "tied are not names")
    expect(isinstance(transient, list) and all(isinstance(name, str) for name in transient), "transient are not names")
    check_spikes(values.get("spikes", {}))
    check_hooks(values.get("hooks", {}))
    if "stream" in values:  # its state is decoded by util/json_state.py
        cursor = values["stream"]
        counts = [cursor.get(key) for key in ("samples", "epoch", "offset")]
        expect(all(map(is_count, counts)), "stream is not a position")
        if "mark" in cursor:
            mark = cursor["mark"]
            expect(isinstance(mark, dict) and "state" in mark and is_count(mark.get("offset")), "stream has no state")
    extra = values.get("extra", {})
    for key in ("optimizer", "precision", "base"):
        part = extra.get(key, {})
        expect(isinstance(part, dict) or (key == "base" and isinstance(part, str)), f"extra.{key} is not an object")
    precision = extra.get("precision", {})
    numbers = [precision.get("scale", 1.0), precision.get("good_steps", 0)]
    expect(all(map(is_number, numbers)) and numbers[0] > 0 and numbers[1] >= 0, "extra.precision is not a loss scale")
    for name, counts in extra.get("optimizer", {}).items():
        fine = isinstance(counts, dict) and all(is_number(v) for v in counts.values())
        expect(fine, f"extra.optimizer of {name:.80} is not an object of numbers")


def check_spikes(spikes: dict[str, Any]) -> None:
    """Check the recent losses and norms, and the samples that the run passes over."""
    recent, passed_over = spikes.get("recent", []), spikes.get("passed_over", [])
    fine = is_count(spikes.get("in_a_row", 0)) and isinstance(recent, list) and isinstance(passed_over, list)
    fine = fine and all(isinstance(e, list) and len(e) == 3 and all(map(is_number, e)) for e in recent)
    keys = ("step", "begin", "end")
    fine = fine and all(isinstance(p, dict) and all(is_count(p.get(key)) for key in keys) for p in passed_over)
    expect(fine, "spikes are not losses, norms and ranges of samples")


def check_hooks(hooks: dict[str, Any]) -> None:
    """Check the states of hooks, as far as dtrain reads them itself (util/json_state.py decodes the rest)."""
    parts = [hooks.get("states", {}), hooks.get("evaluation", {})]
    expect(all(isinstance(part, dict) for part in parts), "hooks are not states and an evaluation")
    ended = hooks.get("ended")
    if ended is not None:
        fine = isinstance(ended, dict) and is_count(ended.get("step"))
        fine = fine and all(isinstance(ended.get(key), str) for key in ("hook", "reason"))
        expect(fine, "hooks.ended is not a hook, a reason and a step")


def check_files(files: Any) -> dict[str, dict[str, Any]]:
    expect(isinstance(files, dict) and 0 < len(files) <= MAX_FILES, "files is not an object")
    for name, spec in files.items():
        expect(bool(FILE_NAME.fullmatch(name)), f"{name!r:.80} is not a valid name of a checkpoint file")
        expect(isinstance(spec, dict) and is_count(spec.get("size")), f"{name} has no size")
        digest = spec.get("sha256")
        expect(isinstance(digest, str) and bool(re.fullmatch(r"[0-9a-f]{64}", digest)), f"{name} has no checksum")
    return dict(files)


def check_parts(name: str, chunks: Any, files: dict[str, Any]) -> list[Part]:
    """Check and return a tensor's boxes in the first format."""
    expect(isinstance(chunks, list), f"{name} has no list of chunks")
    parts = []
    for chunk in chunks:
        expect(isinstance(chunk, dict), f"a chunk of {name} is not an object")
        file, key = chunk.get("file"), chunk.get("key", name)
        expect(isinstance(file, str) and file in files, f"a chunk of {name} names no file of the checkpoint")
        expect(isinstance(key, str), f"a chunk of {name} has no key")
        parts.append(Part(file, key, layouts.ints(chunk.get("offset")), layouts.ints(chunk.get("shape"))))
    return parts


def check_needed(manifest: Manifest, needed: tuple[str, ...]) -> None:
    """Check that a manifest has what a run needs to resume; `extra.optimizer` is a part of `extra`."""
    for name in needed:
        key, _, part = name.partition(".")
        expect(key in manifest.meta and (not part or part in manifest[key]), f"{name} is missing")
    if "extra.optimizer" in needed:
        trained = {name.split(".", 1)[1].rpartition(".")[0] for name in manifest.tensors if name.startswith("optim.")}
        uncounted = sorted(trained - set(manifest["extra"]["optimizer"]))
        expect(not uncounted, f"extra.optimizer lacks {', '.join(uncounted[:3])}")


def check_boxes(manifest: Manifest, rank: int, boxes: dict[str, list[Box]]) -> None:
    """Check that a rank's files hold exactly the parts that the layouts assign to it."""
    for name, tensor in manifest.tensors.items():
        expect(
            tensor.layout.is_written_by(rank, boxes.get(name, ())),
            f"rank {rank}'s files do not hold the shards of {name} that its layout assigns",
        )
    unknown = sorted(set(boxes) - set(manifest.tensors))
    expect(not unknown, f"rank {rank}'s files hold {', '.join(unknown[:3])}, which the manifest does not list")


def expect(condition: Any, problem: str) -> None:
    if not condition:
        raise Damaged(f"manifest.json: {problem}")


def is_count(value: Any) -> bool:
    return type(value) is int and 0 <= value < 2**62


def is_number(value: Any) -> bool:
    return type(value) in (int, float) and math.isfinite(value)
