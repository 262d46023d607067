"""Is a checkpoint on disk what was saved? Every byte is checked; a damaged checkpoint is renamed, never deleted."""

from __future__ import annotations

import os
import uuid
from pathlib import Path
from typing import Any

from dtrain.checkpoint import manifest, shards
from dtrain.checkpoint.manifest import Damaged
from dtrain.checkpoint.rank_files import Files, content, in_parallel
from dtrain.util.collective import Group, agreed, all_problems, rank, world_size


def verify(path: Path, group: Group = None, needed: tuple[str, ...] = (), step: int | None = None) -> str:
    """Return what is damaged in a checkpoint, or "". The ranks share the files; all get the same answer.

    `needed`: keys that its manifest must have. `step`: the step that it must hold, by its name.

    Damage is only bytes that differ from what was saved, or content that no save writes. A disk that does not respond
    raises an error, and nothing is renamed.
    """
    problem = ""
    with agreed(f"reading {path}", group=group):
        try:
            saved = manifest.read(path)
            if step is not None and saved["step"] != step:
                raise Damaged(f"its folder name does not match its step, {saved['step']}")
            manifest.check_needed(saved, needed)
            mine = sorted(saved.files_of)[rank() :: world_size()]
            for writer in mine:  # headers first, because they are short
                shards.check_files(path, saved, writer)
            files = [file for writer in mine for file in saved.files_of[writer]]
            problem = next((p for p in in_parallel(lambda f: damage(path / f, saved.files[f]), files) if p), "")
        except Damaged as error:
            problem = str(error)
    return next(iter(all_problems(problem, group)), "")


def compare(path: Path, files: Files, specs: dict[str, Any], group: Group = None) -> str:
    """Return how a checkpoint on disk differs from what the ranks have just written, or "". All get the same answer.

    Like `verify`, but each rank compares its files with the tensors that it still holds instead of hashing them again:
    faster on a CPU without SHA instructions. `specs`: the entries of this rank's files that the manifest must have.
    """
    problem = ""

    def check(file: str) -> str:
        return f"{file} differs from what was written" if shards.differing(path / file, *content(files[file])) else ""

    with agreed(f"reading {path}", group=group):
        try:
            saved = manifest.read(path)
            if {file: saved.files.get(file) for file in specs} != specs:
                raise Damaged("manifest.json has other checksums than were written")
            shards.check_files(path, saved, rank())
            problem = next((p for p in in_parallel(check, files) if p), "")
        except Damaged as error:
            problem = str(error)
    return next(iter(all_problems(problem, group)), "")


def damage(file: Path, spec: dict[str, Any]) -> str:
    """Return what is wrong with one file, or an empty string."""
    size = file.stat().st_size
    if size != spec["size"]:
        return f"{file.name} has {size} bytes instead of {spec['size']}"
    return "" if shards.sha256(file) == spec["sha256"] else f"{file.name} does not match its checksum"


def put_aside(path: Path, group: Group = None) -> None:
    with agreed(f"renaming {path}", group=group):
        if rank() == 0:
            os.rename(path, path.with_name(f"{path.name}.corrupt-{uuid.uuid4().hex[:4]}"))
