"""Checkpoints that move between strategies and world sizes; a crash or a flipped bit is always detected.

`checkpoints/step-00000100/` holds safetensors shards and `manifest.json` (manifest.py), which has every file's size and
sha256, every tensor's shape and layout, and the non-tensor state. Nothing is pickled. A save writes to a new folder:
shards, then the manifest, all flushed, then one rename, then `latest`. So a folder with the right name is a complete
checkpoint, whenever the machine died.

Every function here that takes part in a run is collective: all ranks call it and get the same result, over `group`
(collective.py). dtrain/checkpoint/background.py calls them while training continues.
"""

from __future__ import annotations

import hashlib
import logging
import os
import shutil
import uuid
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor

from dtrain.checkpoint import compression_errors as errors
from dtrain.checkpoint import manifest, moments, shards
from dtrain.checkpoint.incremental import Links
from dtrain.checkpoint.integrity import compare, put_aside, verify
from dtrain.checkpoint.layouts import LayoutError
from dtrain.checkpoint.manifest import Manifest as Manifest
from dtrain.checkpoint.ownership import is_foreign, metrics_of, run_id
from dtrain.checkpoint.rank_files import Files, share_out, write_files
from dtrain.checkpoint.writers import Writers
from dtrain.errors import CheckpointError as CheckpointError
from dtrain.errors import bad
from dtrain.runs.best import best_of
from dtrain.runs.folder import checkpoints
from dtrain.util.collective import Group, agreed, collect, distinct, failpoint, from_rank_0, rank
from dtrain.util.collective import gather as gather
from dtrain.util.dtensor import Held, chunks_of
from dtrain.util.format import counted

log = logging.getLogger("dtrain")
read_manifest = manifest.read


# ---- save ----------------------------------------------------------------------------------------------------


class Saved(NamedTuple):
    """A checkpoint that was committed: its path, the manifest's entries of this rank's files, and all ranks' bytes."""

    path: Path
    specs: dict[str, Any]
    written_bytes: int
    linked_bytes: int


def save(
    folder: Path,
    step: int,
    tensors: Mapping[str, Held],
    meta: dict[str, Any],
    keep: int,
    links: Links | None = None,
    best: tuple[str, str] | None = None,
) -> Path:
    """Save under `folder`. When this returns on any rank, the checkpoint is on disk and is `latest`."""
    writers = Writers()
    files = share_out(tensors, writers, links)
    saved = commit(folder, step, files, writers.index, meta, links=links)
    prune(folder, saved, keep, files, links=links, best=best)
    return saved.path


def commit(
    folder: Path,
    step: int,
    files: Files,
    index: dict[str, Any],
    meta: dict[str, Any],
    group: Group = None,
    links: Links | None = None,
) -> Saved:
    """Write every rank's files and make them the `latest` checkpoint.

    If a good checkpoint of this step is there, it stays, and nothing is written.
    """
    final = folder / f"step-{step:08d}"
    what = f"saving {final}"

    def begin() -> tuple[str, bool]:
        attempt = folder / f".attempt-{step}-{uuid.uuid4().hex[:8]}"
        if final.exists() and is_foreign(final, run_id(folder)):
            os.rename(final, final.with_name(f"{final.name}.other-run-{uuid.uuid4().hex[:4]}"))
        for stale in folder.glob(".attempt-*"):  # left by a run that was killed during a save
            shutil.rmtree(stale, ignore_errors=True)
        attempt.mkdir(parents=True)
        return attempt.name, final.exists()

    failpoint("save.begin")
    name, is_there = from_rank_0(begin, what, group)
    attempt = folder / name
    if is_there:
        if not verify(final, group, step=step):  # saved before a restart of this run, and good
            from_rank_0(attempt.rmdir, what, group)
            if links:
                links.end(None, {}, {})
            return Saved(final, {}, 0, 0)
        put_aside(final, group)
    with agreed(what, attempt, group):
        written = write_files(attempt, files, links)
        failpoint("save.shard")
    of_all = collect([written, sum(links.linked.values()) if links else 0], group)
    reports = {file: spec for by_rank, _ in of_all for file, spec in by_rank.items()}

    def end() -> tuple[int, int]:
        try:
            values = manifest.content(step, {"run": run_id(folder)} | meta, reports, index)
            manifest.parse(values)  # never save what a load would call damaged
            write_manifest(attempt, values)
            failpoint("save.manifest")
            os.rename(attempt, final)
        except LayoutError as error:
            shutil.rmtree(attempt, ignore_errors=True)
            raise CheckpointError(str(error)) from error
        except (OSError, CheckpointError):
            shutil.rmtree(attempt, ignore_errors=True)
            raise
        shards.fsync_folder(folder)
        failpoint("save.rename")
        point_latest(folder, final.name)
        failpoint("save.latest")
        linked = sum(num_bytes for _, num_bytes in of_all)
        return sum(spec["size"] for spec in reports.values()) - linked, linked

    num_bytes = from_rank_0(end, what, group)
    if links:
        links.end(final, written, files)
    return Saved(final, written, *num_bytes)


def write_manifest(folder: Path, content: dict[str, Any]) -> None:
    manifest.write(folder, content)
    shards.fsync_folder(folder)


def point_latest(folder: Path, name: str) -> None:
    temporary = folder / ".latest.tmp"
    with open(temporary, "w") as file:
        file.write(name + "\n")
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, folder / "latest")
    shards.fsync_folder(folder)


def prune(
    folder: Path,
    newest: Saved,
    keep: int,
    files: Files,
    group: Group = None,
    links: Links | None = None,
    best: tuple[str, str] | None = None,
) -> None:
    """Delete all but the newest `keep`, but only after the newest was read back from disk and verified.

    `best`: a metric of the evaluations, and min or max: the checkpoint with its best value stays, too.

    `files`: what this rank has just written of the newest. Files that it linked were read before.

    Checkpoints of another run in the same folder are neither counted nor deleted.
    """

    def others() -> list[str]:
        run = run_id(folder)
        own = [p for p in checkpoints(folder) if p == newest.path or not is_foreign(p, run)]
        best_step = best_of({int(p.name[5:]): metrics_of(p) for p in own}, *best) if best else None
        older = [p.name for p in own if p != newest.path][keep - 1 :]
        return [name for name in older if int(name[5:]) != best_step]

    old = from_rank_0(others, f"listing {folder}", group)
    if not old:
        return
    if links:
        files = {file: chunks for file, chunks in files.items() if file not in links.linked}
    problem = compare(newest.path, files, newest.specs, group) if newest.specs else verify(newest.path, group)
    if problem:
        raise CheckpointError(
            f"{newest.path} does not read back as it was written ({problem}); older checkpoints are kept"
        )
    if rank() == 0:
        for name in old:
            doomed = folder / f".attempt-pruned-{name}"  # rename first: a half-deleted folder must not look complete
            try:
                os.rename(folder / name, doomed)
                failpoint("save.prune")
                shutil.rmtree(doomed)
            except OSError as error:  # an undeletable file wastes space, but must not end the run
                log.warning("could not delete the old checkpoint %s: %s", name, error)


# ---- load ----------------------------------------------------------------------------------------------------


def load(path: Path, saved: Manifest, tensors: Mapping[str, Held]) -> None:
    """Fill this rank's tensors in place from a checkpoint saved under any layout. Other dtypes are converted.

    Tensors named `strategy.…` belong to one strategy: they are filled if they are in the checkpoint, and ignored by
    other strategies.
    """
    chunks = {name: chunks_of(held) for name, held in tensors.items()}
    by_rank = {name: chunks.pop(name) for name in tensors if name.startswith(errors.PREFIX)}
    # a pipeline rank knows only its own stage: the model's tensors are the union over all ranks
    shapes: dict[str, list[int]] = {}
    for part in distinct({name: list(c[0].whole_shape) for name, c in chunks.items() if c}):
        shapes |= part
    missing = [n for n in shapes if n not in saved.tensors and not moments.only_scales(n, saved.tensors)]
    unknown = [n for n in saved.tensors if n not in shapes and not moments.only_scales(n, shapes)]
    wrong = [f"{n} is missing in the checkpoint" for n in missing if not is_own(n)]
    wrong += [f"{n} is not in the model" for n in unknown if not is_own(n)]
    wrong += [
        f"{n} has shape {list(saved.tensors[n].shape)} in the checkpoint, {shape} in the model"
        for n, shape in shapes.items() if n in saved.tensors and list(saved.tensors[n].shape) != shape
    ]  # fmt: skip
    if wrong:  # first of the weights, not of what the optimizer has for each
        wrong = [text.removeprefix("model.") for text in wrong if text.startswith("model.")] or wrong
        rule = f"{path}: is a checkpoint of another model: {wrong[0]}; {counted(len(wrong), 'difference')} in all"
        error = ValueError(f"{rule}\n  fix: resume with the model that it was saved from")
        error.differences = wrong  # type: ignore[attr-defined]
        raise error
    with shards.Reader(path, saved) as reader:
        for name, held in chunks.items():
            for chunk in held if name in saved.tensors else []:
                moments.fill(reader, name, chunk, chunks)
        errors.fill(reader, saved, by_rank)


def is_own(name: str) -> bool:
    """Does a tensor belong to one strategy, so that others can do without it?"""
    return name.startswith(("strategy.", errors.PREFIX))


def weights(path: Path, average: bool = False) -> Iterator[tuple[str, Tensor]]:
    """Yield the model's full weights, one at a time, by canonical name: for export, sampling and the weights' hash.

    `average`: the moving averages of those that have one, which are all that are trained.
    """
    saved = read_manifest(path)
    if average and not any(name.endswith(".ema") for name in saved.tensors if name.startswith("optim.")):
        raise bad("--ema", path, "it has no averages of its weights", "leave --ema out, or train with ema.decay=0.999")
    with shards.Reader(path, saved) as reader:
        for name in sorted(n for n in saved.tensors if n.startswith("model.")):
            averaged = f"optim.{name.removeprefix('model.')}.ema"
            yield name.removeprefix("model."), reader.whole(averaged if average and averaged in saved.tensors else name)


def weights_sha256(path: Path) -> str:
    """Return a hash of the fp32 weights: the same for every layout that holds the same values."""
    digest = hashlib.sha256()
    for name, tensor in weights(path):
        digest.update(f"{name}{list(tensor.shape)}".encode())
        digest.update(tensor.float().contiguous().reshape(-1).numpy().data)
    return digest.hexdigest()
