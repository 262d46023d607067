"""Which checkpoint a run resumes from: the newest good one, or that of the step that was asked for."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path

from dtrain.checkpoint import manifest, shards
from dtrain.checkpoint.integrity import put_aside, verify
from dtrain.checkpoint.manifest import Manifest
from dtrain.checkpoint.ownership import is_foreign, run_id
from dtrain.checkpoint.store import point_latest
from dtrain.errors import CheckpointError
from dtrain.runs.folder import checkpoints, read_json
from dtrain.runs.protocol import GO_BACK
from dtrain.util.collective import from_rank_0


def newest_good(
    folder: Path,
    say: Callable[[str], object] = print,
    quarantine: bool = True,
    needed: tuple[str, ...] = (),
) -> tuple[Path, Manifest] | None:
    """Return the newest checkpoint that verifies, or None; a damaged one is reported and renamed.

    `needed`: keys that its manifest must have. A checkpoint that another run saved is left alone.
    """
    names, run = from_rank_0(lambda: ([p.name for p in checkpoints(folder)], run_id(folder)), f"listing {folder}")
    foreign = []
    for name in names:
        problem = verify(folder / name, needed=needed, step=int(name[5:]))
        if not problem:
            found = manifest.read(folder / name)
            if not from_rank_0(partial(is_foreign, folder / name, run), f"reading {folder}"):
                return folder / name, found
            foreign.append(name)
            say(f"checkpoint {name} was saved by another run, and is left alone; trying an older one")
            continue
        if quarantine:
            put_aside(folder / name)
        aside = " and was renamed to .corrupt" if quarantine else ""
        say(f"checkpoint {name} is damaged ({problem}){aside}; trying an older one")
    if foreign:
        raise CheckpointError(
            f"{folder / foreign[0]} was saved by another run. "
            f"Fix: move it away; to start from its weights: init_from={folder / foreign[0]} in a new run"
        )
    if names or from_rank_0((folder / "latest").exists, f"reading {folder}"):
        raise CheckpointError(f"no usable checkpoint is left in {folder}. Fix: start a new run, or restore a copy")
    return None


def go_back(
    folder: Path, say: Callable[[str], object] = print, needed: tuple[str, ...] = ()
) -> tuple[Path, Manifest] | None:
    """Go back to the step that the launcher was asked for (resume=RUN@STEP); None: it was asked for none.

    First verify its checkpoint: a damaged one raises an error, and nothing changes. Then move what is newer to a folder
    of its own: checkpoints, and the metrics, from which a resume drops later steps. Killed in between, the next start
    does the rest.
    """

    def asked() -> int | None:
        step = read_json(folder / GO_BACK).get("step")
        return step if isinstance(step, int) else None

    step = from_rank_0(asked, f"reading {folder}")
    if step is None:
        return None
    path = folder / f"step-{step:08d}"
    problem = verify(path, needed=needed, step=step) or (
        "it was saved by another run"
        if from_rank_0(lambda: is_foreign(path, run_id(folder)), f"reading {path}")
        else ""
    )
    if problem:
        raise CheckpointError(f"{path} cannot be used: {problem}. Nothing was moved. Fix: resume from another step")

    def move() -> str:
        taken = [int(p.name[9:]) for p in folder.glob("replaced-*") if p.name[9:].isdecimal()]
        number = 1 + max(taken, default=0)
        aside = folder / f"replaced-{number}"
        newer = [p for p in checkpoints(folder) if int(p.name[5:]) > step]
        if newer:
            aside.mkdir()
            metrics = folder.parent / "metrics.jsonl"
            if metrics.exists():
                shutil.copy2(metrics, aside / metrics.name)
            for newest in newer:
                os.rename(newest, aside / newest.name)
            shards.fsync_folder(aside)
            shards.fsync_folder(folder)
        point_latest(folder, path.name)
        (folder / GO_BACK).unlink()
        return f"{len(newer)} newer checkpoints, and the metrics up to them, are in {aside}" if newer else ""

    if text := from_rank_0(move, f"going back to {path}"):
        say(text)
    return path, manifest.read(path)
