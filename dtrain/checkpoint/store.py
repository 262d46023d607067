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
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor

from dtrain.checkpoint import compression_errors as errors
from dtrain.checkpoint import manifest, moments, shards
from dtrain.checkpoint.incremental import Links
from dtrain.checkpoint.layouts import LayoutError
from dtrain.checkpoint.manifest import Damaged as Damaged
from dtrain.checkpoint.manifest import Manifest as Manifest
from dtrain.checkpoint.rank_files import Files, content, in_parallel, share_out, write_files
from dtrain.checkpoint.writers import Writers
from dtrain.errors import CheckpointError as CheckpointError
from dtrain.errors import bad
from dtrain.runs.best import METRICS, best_of, is_of_other_data
from dtrain.runs.folder import checkpoints, read_json
from dtrain.runs.protocol import GO_BACK
from dtrain.util.collective import (
    Group,
    agreed,
    all_problems,
    collect,
    distinct,
    failpoint,
    from_rank_0,
    rank,
    world_size,
)
from dtrain.util.collective import broadcast as broadcast
from dtrain.util.collective import gather as gather
from dtrain.util.dtensor import Held, chunks_of
from dtrain.util.format import as_dict

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
            found = read_manifest(folder / name)
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


def run_id(folder: Path) -> str | None:
    """Return the id of the run that a folder of checkpoints belongs to; None for runs of older versions."""
    found = read_json(folder.parent / "launch.json").get("id")
    return found if isinstance(found, str) else None


def differs(saved: Any, run: str | None) -> bool:
    return saved is not None and run is not None and saved != run


def is_foreign(path: Path, run: str | None) -> bool:
    """Return whether another run saved a checkpoint. An unreadable one counts as ours and is renamed as damaged."""
    try:
        return run is not None and differs(read_manifest(path).meta.get("run"), run) and not is_forked(path)
    except (CheckpointError, OSError):
        return False


def forked_from(folder: Path) -> dict[str, Any]:
    """Return what launch.json says about the checkpoint that a fork began with (launch/fork.py); {}: no fork."""
    return as_dict(read_json(folder.parent / "launch.json").get("forked_from"))


def is_forked(path: Path) -> bool:
    """Is it the checkpoint that a fork began with, and so saved by the run that it was forked from?"""
    origin, saved = forked_from(path.parent), read_manifest(path)
    return saved["step"] == origin.get("step") and not differs(saved.meta.get("run"), origin.get("id"))


def metrics_of(path: Path) -> dict[str, Any]:
    """Return the metrics of the evaluation at a checkpoint's step; {} if there was none, or if it is damaged.

    {} also if a fork with other data began there: those of the parent were measured on its own data.
    """
    try:
        saved = read_manifest(path)
        elsewhere = is_of_other_data(forked_from(path.parent), saved["step"], saved.meta.get("run"))
        return {} if elsewhere else as_dict(saved.meta.get(METRICS))
    except (CheckpointError, OSError):
        return {}


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
    return path, read_manifest(path)


def put_aside(path: Path, group: Group = None) -> None:
    with agreed(f"renaming {path}", group=group):
        if rank() == 0:
            os.rename(path, path.with_name(f"{path.name}.corrupt-{uuid.uuid4().hex[:4]}"))


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
            saved = read_manifest(path)
            if {file: saved.files.get(file) for file in specs} != specs:
                raise Damaged("manifest.json has other checksums than were written")
            shards.check_files(path, saved, rank())
            problem = next((p for p in in_parallel(check, files) if p), "")
        except Damaged as error:
            problem = str(error)
    return next(iter(all_problems(problem, group)), "")


def verify(path: Path, group: Group = None, needed: tuple[str, ...] = (), step: int | None = None) -> str:
    """Return what is damaged in a checkpoint, or "". The ranks share the files; all get the same answer.

    `needed`: keys that its manifest must have. `step`: the step that it must hold, by its name.

    Damage is only bytes that differ from what was saved, or content that no save writes. A disk that does not respond
    raises an error, and nothing is renamed.
    """
    problem = ""
    with agreed(f"reading {path}", group=group):
        try:
            saved = read_manifest(path)
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


def damage(file: Path, spec: dict[str, Any]) -> str:
    """Return what is wrong with one file, or an empty string."""
    size = file.stat().st_size
    if size != spec["size"]:
        return f"{file.name} has {size} bytes instead of {spec['size']}"
    return "" if shards.sha256(file) == spec["sha256"] else f"{file.name} does not match its checksum"


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
    if wrong:
        raise CheckpointError(
            f"{path} is a checkpoint of another model: {wrong[0]}; {len(wrong)} differences in all. "
            "Fix: use the model that it was saved from, or another run_dir"
        )
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
