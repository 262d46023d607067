"""Checkpoints that move between strategies and world sizes; a crash or a flipped bit is always detected.

`checkpoints/step-00000100/` holds safetensors shards and `manifest.json` (manifest.py), which has every file's size and
sha256, every tensor's shape and layout, and the state that is no tensor. Nothing is pickled. A save goes into a fresh
folder: shards, then the manifest, all flushed, then one rename, then `latest`. So a folder with the right name is a
whole checkpoint, at whatever moment the machine died.

Every function here that takes part in a run is collective: all ranks call it, and all agree on what came out, over
`group` (agreement.py). dtrain/saving.py calls them while training continues.
"""

from __future__ import annotations

import hashlib
import logging
import os
import shutil
import uuid
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dtrain import manifest, shards
from dtrain.agreement import Group, agreed, collect, distinct, failpoint, from_rank_0, rank, world_size
from dtrain.agreement import broadcast as broadcast
from dtrain.agreement import gather as gather
from dtrain.layouts import LayoutError
from dtrain.manifest import CheckpointError as CheckpointError
from dtrain.manifest import Damaged as Damaged
from dtrain.manifest import Manifest as Manifest
from dtrain.rundir import checkpoints, read_json
from dtrain.shards import Chunk, Held, Names, chunks_of
from dtrain.writers import Writers

log = logging.getLogger("dtrain")
# sha256 is what limits one file: 1.2 GiB/s of a core, where a disk takes 2. So a rank's share is several files, each
# hashed and written by a thread; below this size that is not worth the files.
MAX_FILES, FILE_BYTES = 8, 256 * 2**20

read_manifest = manifest.read
Files = dict[str, dict[Names, Chunk]]  # what a rank writes, by file


# ---- save ----------------------------------------------------------------------------------------------------


def save(folder: Path, step: int, tensors: Mapping[str, Held], meta: dict[str, Any], keep: int) -> Path:
    """Save under `folder`, in agreement: when this returns, on any rank, the checkpoint is on disk and `latest`."""
    writers = Writers()
    files = share_out(tensors, writers)
    final, _ = commit(folder, step, files, writers.index, meta)
    prune(folder, final, keep)
    return final


def share_out(tensors: Mapping[str, Held], writers: Writers) -> Files:
    """What this rank writes of all that the ranks hold, and into which files."""
    # one name in a rank's file may stand for several boxes of a tensor: the first has the name itself
    chunks = {
        (name, name if i == 0 else f"{name}#{i}"): chunk
        for name, held in tensors.items() for i, chunk in enumerate(chunks_of(held))
        if chunk.nbytes or not chunk.shape  # an uneven shard leaves some ranks with nothing
    }  # fmt: skip
    assert len({key for _, key in chunks}) == len(chunks), "a name with # in it is another's second box"
    chosen = writers.choose(
        [
            (name, c.offset, c.shape, c.whole_shape, str(c.values.dtype).removeprefix("torch."))
            for (name, _), c in chunks.items()
        ]
    )
    mine = {names: c for names, c in chunks.items() if (names[0], c.offset, c.shape) in chosen}
    num_files = max(1, min(MAX_FILES, sum(c.nbytes for c in mine.values()) // FILE_BYTES))
    stem = f"rank-{rank():05d}"
    files: Files = {f"{stem}-{i}.safetensors" if i else f"{stem}.safetensors": {} for i in range(num_files)}
    load, file_of = dict.fromkeys(files, 0), {}
    for names in sorted(mine, key=lambda names: -mine[names].nbytes):  # the largest first: evener
        file_of[names] = min(load, key=load.__getitem__)
        load[file_of[names]] += mine[names].nbytes
    for names, chunk in mine.items():
        files[file_of[names]][names] = chunk
    return files


def commit(
    folder: Path, step: int, files: Files, index: dict[str, Any], meta: dict[str, Any], group: Group = None
) -> tuple[Path, int]:
    """Write every rank's files, and make them a checkpoint that is `latest`; give it and its bytes over all ranks."""
    final = folder / f"step-{step:08d}"
    what = f"saving {final}"

    def begin() -> tuple[str, bool]:
        attempt = folder / f".attempt-{step}-{uuid.uuid4().hex[:8]}"
        if final.exists() and is_foreign(final, run_id(folder)):
            os.rename(final, final.with_name(f"{final.name}.other-run-{uuid.uuid4().hex[:4]}"))
        for stale in folder.glob(".attempt-*"):  # of a run that was killed while it saved
            shutil.rmtree(stale, ignore_errors=True)
        attempt.mkdir(parents=True)
        return attempt.name, final.exists()

    failpoint("save.begin")
    name, is_there = from_rank_0(begin, what, group)
    attempt = folder / name
    if is_there:
        if not verify(final, group, step=step):  # an earlier life of this run saved this very step, and it is as good
            from_rank_0(attempt.rmdir, what, group)
            return final, 0
        put_aside(final, group)
    with agreed(what, attempt, group):
        written = write_files(attempt, files)
        failpoint("save.shard")
    reports = {file: spec for by_rank in collect(written, group) for file, spec in by_rank.items()}

    def end() -> int:
        try:
            values = manifest.content(step, {"run": run_id(folder)} | meta, reports, index)
            manifest.parse(values)  # what a load would call damaged is never saved
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
        return sum(spec["size"] for spec in reports.values())

    return final, int(from_rank_0(end, what, group))


def write_files(folder: Path, files: Files) -> dict[str, Any]:
    """Write a rank's files, all at once; what the manifest says of each."""
    if any(c.values.is_cuda for chunks in files.values() for c in chunks.values()):
        torch.cuda.synchronize()  # other threads copy from it, each in a stream of its own

    def write(file: str) -> dict[str, Any]:
        chunks = files[file]
        values = {key: c.values for (_, key), c in chunks.items()}
        size, digest = shards.write(folder / file, values, shards.metadata(chunks))
        return {"size": size, "sha256": digest}

    with ThreadPoolExecutor(num_threads()) as pool:
        return dict(zip(files, pool.map(write, files), strict=True))


def num_threads() -> int:
    """How many files a rank hashes at once: a core for each, of those that are this rank's."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min(MAX_FILES, cores // int(os.environ.get("LOCAL_WORLD_SIZE", 1))))


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


def prune(folder: Path, newest: Path, keep: int, group: Group = None) -> None:
    """Delete all but the newest `keep`, but only once the newest was read back from the disk and found whole.

    Checkpoints of another run that lie there are neither counted nor deleted.
    """

    def others() -> list[str]:
        run = run_id(folder)
        return [p.name for p in checkpoints(folder) if p != newest and not is_foreign(p, run)][keep - 1 :]

    old = from_rank_0(others, f"listing {folder}", group)
    if not old:
        return
    problem = verify(newest, group)
    if problem:
        raise CheckpointError(f"{newest} does not read back as it was written ({problem}); older checkpoints are kept")
    if rank() == 0:
        for name in old:
            doomed = folder / f".attempt-pruned-{name}"  # renamed first: a half-deleted folder must not look whole
            try:
                os.rename(folder / name, doomed)
                failpoint("save.prune")
                shutil.rmtree(doomed)
            except OSError as error:  # a stuck file costs room, and is no reason to end a run
                log.warning("could not delete the old checkpoint %s: %s", name, error)


# ---- load ----------------------------------------------------------------------------------------------------


def newest_good(
    folder: Path,
    say: Callable[[str], object] = print,
    quarantine: bool = True,
    needed: tuple[str, ...] = (),
) -> tuple[Path, Manifest] | None:
    """The newest checkpoint whose every byte is as it was saved, or None; a damaged one is named and put aside.

    `needed`: what its manifest must have beside the tensors. One that another run saved is left alone.
    """
    names, run = from_rank_0(lambda: ([p.name for p in checkpoints(folder)], run_id(folder)), f"listing {folder}")
    foreign = []
    for name in names:
        problem = verify(folder / name, needed=needed, step=int(name[5:]))
        if not problem:
            found = read_manifest(folder / name)
            if not differs(found.meta.get("run"), run):
                return folder / name, found
            foreign.append(name)
            say(f"checkpoint {name} was saved by another run, and is left alone; trying an older one")
            continue
        if quarantine:
            put_aside(folder / name)
        aside = " and was put aside as .corrupt" if quarantine else ""
        say(f"checkpoint {name} is damaged ({problem}){aside}; trying an older one")
    if foreign:
        raise CheckpointError(
            f"{folder / foreign[0]} was saved by another run. "
            f"Fix: move it away; to start from its weights: init_from={folder / foreign[0]} in a new run"
        )
    if names or from_rank_0((folder / "latest").exists, f"reading {folder}"):
        raise CheckpointError(f"no good checkpoint is left in {folder}. Fix: start a new run, or bring back a copy")
    return None


def run_id(folder: Path) -> str | None:
    """The id of the run that a folder of checkpoints belongs to; None for runs of older versions."""
    found = read_json(folder.parent / "launch.json").get("id")
    return found if isinstance(found, str) else None


def differs(saved: Any, run: str | None) -> bool:
    return saved is not None and run is not None and saved != run


def is_foreign(path: Path, run: str | None) -> bool:
    """Whether another run saved a checkpoint. One that cannot be read is ours: it is put aside as damaged."""
    try:
        return run is not None and differs(read_manifest(path).meta.get("run"), run)
    except (CheckpointError, OSError):
        return False


def put_aside(path: Path, group: Group = None) -> None:
    with agreed(f"renaming {path}", group=group):
        if rank() == 0:
            os.rename(path, path.with_name(f"{path.name}.corrupt-{uuid.uuid4().hex[:4]}"))


def verify(path: Path, group: Group = None, needed: tuple[str, ...] = (), step: int | None = None) -> str:
    """What is damaged in a checkpoint, or "". The ranks share the files; all get the same answer.

    `needed`: what its manifest must have beside the tensors. `step`: the one that it must hold, by its name.

    Only bytes that differ from what was saved are damage, and content that no save writes. A disk that does not answer
    is an error, and no reason to put anything aside.
    """
    problem = ""
    with agreed(f"reading {path}", group=group):
        try:
            saved = read_manifest(path)
            if step is not None and saved["step"] != step:
                raise Damaged(f"it holds step {saved['step']} under another name")
            manifest.check_needed(saved, needed)
            mine = sorted(saved.files_of)[rank() :: world_size()]
            for writer in mine:  # first the headers, which are short
                shards.check_files(path, saved, writer)
            files = [file for writer in mine for file in saved.files_of[writer]]
            with ThreadPoolExecutor(num_threads()) as pool:
                problem = next(
                    (p for p in pool.map(lambda file: damage(path / file, saved.files[file]), files) if p), ""
                )
        except Damaged as error:
            problem = str(error)
    return next((p for p in gather(problem, group) if p), "")


def damage(file: Path, spec: dict[str, Any]) -> str:
    """What is wrong with one file, or ""."""
    size = file.stat().st_size
    if size != spec["size"]:
        return f"{file.name} has {size} bytes instead of {spec['size']}"
    return "" if shards.sha256(file) == spec["sha256"] else f"{file.name} does not match its checksum"


def load(path: Path, saved: Manifest, tensors: Mapping[str, Held]) -> None:
    """Fill what this rank holds, in place, from a checkpoint saved under any layout."""
    chunks = {name: chunks_of(held) for name, held in tensors.items()}
    # a pipeline's rank knows its own stage only: what the model has is what all of them have
    shapes: dict[str, list[int]] = {}
    for part in distinct({name: list(c[0].whole_shape) for name, c in chunks.items() if c}):
        shapes |= part
    wrong = [f"{n} is not in it" for n in shapes if n not in saved.tensors]
    wrong += [f"{n} is only in it" for n in saved.tensors if n not in shapes]
    wrong += [
        f"{n} has shape {list(saved.tensors[n].shape)} in it, {shape} here"
        for n, shape in shapes.items() if n in saved.tensors and list(saved.tensors[n].shape) != shape
    ]  # fmt: skip
    if wrong:
        raise CheckpointError(
            f"{path} is a checkpoint of another model: {wrong[0]}; {len(wrong)} differences in all. "
            "Fix: use the model that it was saved from, or another run_dir"
        )
    with shards.Reader(path, saved) as reader:
        for name, held in chunks.items():
            for chunk in held:
                reader.fill(name, chunk)


def weights(path: Path) -> Iterator[tuple[str, Tensor]]:
    """The model's whole weights, one at a time, by canonical name: for export, sampling and the weights' hash."""
    saved = read_manifest(path)
    with shards.Reader(path, saved) as reader:
        for name in sorted(n for n in saved.tensors if n.startswith("model.")):
            yield name.removeprefix("model."), reader.whole(name)


def weights_sha256(path: Path) -> str:
    """A hash of the float32 weights: equal for every layout that holds the same values."""
    digest = hashlib.sha256()
    for name, tensor in weights(path):
        digest.update(f"{name}{list(tensor.shape)}".encode())
        digest.update(tensor.float().contiguous().reshape(-1).numpy().data)
    return digest.hexdigest()
