"""Checkpoints that move between strategies and world sizes, and that no crash or flipped bit can turn into a lie.

`checkpoints/step-00000100/` holds safetensors shards and `manifest.json`, which lists for every tensor its whole
shape and the chunks it was saved in, for every file its size and sha256, and the state that is no tensor. Nothing is
pickled. A save goes into a fresh folder: shards, then the manifest, all flushed, then one rename, then `latest`.
So a folder with the right name is a whole checkpoint, at whatever moment the machine died.

Every function here that takes part in a run is collective: all ranks call it, and all agree on what came out, over
`group` (agreement.py). dtrain/saving.py calls them while the training goes on.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import shutil
import uuid
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dtrain import shards
from dtrain.agreement import CheckpointError as CheckpointError
from dtrain.agreement import Group, agreed, failpoint, rank, world_size
from dtrain.agreement import broadcast as broadcast
from dtrain.agreement import gather as gather
from dtrain.rundir import checkpoints
from dtrain.shards import Chunk, Held, chunks_of

log = logging.getLogger("dtrain")
FORMAT = "dtrain-1"
# sha256 is what limits one file: 1.2 GiB/s of a core, where a disk takes 2. So a rank's share is several files, each
# hashed and written by a thread; below this size that is not worth the files.
MAX_FILES, FILE_BYTES = 8, 256 * 2**20

Names = tuple[str, str]  # of a tensor, and of the box of it in a rank's file
Files = dict[str, dict[Names, Chunk]]  # what a rank writes, by file


class Damaged(CheckpointError):
    """The bytes are not the ones that were saved."""


# ---- save ----------------------------------------------------------------------------------------------------


def save(folder: Path, step: int, tensors: Mapping[str, Held], meta: dict[str, Any], keep: int) -> Path:
    """Save under `folder`, in agreement: when this returns, on any rank, the checkpoint is on disk and `latest`."""
    final, _ = commit(folder, step, share_out(tensors), meta)
    prune(folder, final, keep)
    return final


def share_out(tensors: Mapping[str, Held]) -> Files:
    """What this rank writes of all that the ranks hold, and into which files."""
    # one name in a rank's file may stand for several boxes of a tensor: the first has the name itself
    chunks = {
        (name, name if i == 0 else f"{name}#{i}"): chunk
        for name, held in tensors.items() for i, chunk in enumerate(chunks_of(held))
    }  # fmt: skip
    assert len({key for _, key in chunks}) == len(chunks), "a name with # in it is another's second box"
    mine = {names: chunks[names] for names in assign_writers(chunks)}
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


def commit(folder: Path, step: int, files: Files, meta: dict[str, Any], group: Group = None) -> tuple[Path, int]:
    """Write every rank's files, and make them a checkpoint that is `latest`; give it and its bytes over all ranks."""
    final = folder / f"step-{step:08d}"
    attempt = folder / broadcast(f".attempt-{step}-{uuid.uuid4().hex[:8]}", group)
    failpoint("save.begin")
    if broadcast(final.exists(), group):
        if not verify(final, group):  # an earlier life of this run saved this very step, and it is as good
            return final, 0
        put_aside(final, group)
    with agreed(f"saving {final}", attempt, group):
        if rank() == 0:
            for stale in folder.glob(".attempt-*"):  # of a run that was killed while it saved
                shutil.rmtree(stale, ignore_errors=True)
            attempt.mkdir(parents=True)
    with agreed(f"saving {final}", attempt, group):
        written = write_files(attempt, files)
        failpoint("save.shard")
    reports = [report for by_rank in gather(written, group) for report in by_rank]
    with agreed(f"saving {final}", attempt, group):
        if rank() == 0:
            write_manifest(attempt, manifest(step, reports, meta))
            failpoint("save.manifest")
            os.rename(attempt, final)
            shards.fsync_folder(folder)
            failpoint("save.rename")
            point_latest(folder, final.name)
            failpoint("save.latest")
    return final, sum(report["size"] for report in reports)


def write_files(folder: Path, files: Files) -> list[dict[str, Any]]:
    """Write a rank's files, all at once; what the manifest says of each."""
    if any(c.values.is_cuda for chunks in files.values() for c in chunks.values()):
        torch.cuda.synchronize()  # other threads copy from it, each in a stream of its own

    def write(file: str) -> dict[str, Any]:
        chunks = files[file]
        size, digest = shards.write(folder / file, {key: c.values for (_, key), c in chunks.items()}, {"format": "pt"})
        entries = [
            {"name": name, "whole": c.whole_shape, "dtype": str(c.values.dtype).removeprefix("torch."),
             "chunk": {"file": file, "offset": c.offset, "shape": c.shape} | ({"key": key} if key != name else {})}
            for (name, key), c in chunks.items()
        ]  # fmt: skip
        return {"file": file, "size": size, "sha256": digest, "written": entries}

    with ThreadPoolExecutor(num_threads()) as pool:
        return list(pool.map(write, files))


def num_threads() -> int:
    """How many files a rank hashes at once: a core for each, of those that are this rank's."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min(MAX_FILES, cores // int(os.environ.get("LOCAL_WORLD_SIZE", 1))))


def assign_writers(chunks: dict[Names, Chunk]) -> list[Names]:
    """The chunks that this rank writes. One that several ranks hold is written by one of them, loads balanced."""
    holders: dict[tuple[Any, ...], list[int]] = {}
    sizes: dict[tuple[Any, ...], int] = {}
    names_of = {(names[0], c.offset, c.shape): names for names, c in chunks.items()}
    for r, held in enumerate(gather([(name, c.offset, c.shape, c.nbytes) for (name, _), c in chunks.items()])):
        for name, offset, shape, nbytes in held:
            if nbytes or not shape:  # an uneven cut leaves some ranks with nothing
                holders.setdefault((name, offset, shape), []).append(r)
                sizes[name, offset, shape] = nbytes
    load = [0] * world_size()
    mine = []
    for key in sorted(holders):
        writer = min(holders[key], key=lambda r: (load[r], r))
        load[writer] += sizes[key]
        if writer == rank():
            mine.append(names_of[key])
    return mine


def manifest(step: int, reports: list[dict[str, Any]], meta: dict[str, Any]) -> dict[str, Any]:
    tensors: dict[str, Any] = {}
    for entry in (e for report in reports for e in report["written"]):
        spec = tensors.setdefault(entry["name"], {"shape": entry["whole"], "dtype": entry["dtype"], "chunks": []})
        spec["chunks"].append(entry["chunk"])
    files = {r["file"]: {"size": r["size"], "sha256": r["sha256"]} for r in reports}
    return {"format": FORMAT, "step": step, **meta, "files": files, "tensors": tensors}


def write_manifest(folder: Path, content: dict[str, Any]) -> None:
    content = content | {"sha256": manifest_hash(content)}
    with open(folder / "manifest.json", "w") as file:
        json.dump(content, file, indent=1)
        file.flush()
        os.fsync(file.fileno())
    shards.fsync_folder(folder)


def manifest_hash(content: dict[str, Any]) -> str:
    body = {k: v for k, v in content.items() if k != "sha256"}
    return hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()


def point_latest(folder: Path, name: str) -> None:
    temporary = folder / ".latest.tmp"
    with open(temporary, "w") as file:
        file.write(name + "\n")
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, folder / "latest")
    shards.fsync_folder(folder)


def prune(folder: Path, newest: Path, keep: int, group: Group = None) -> None:
    """Delete all but the newest `keep`, but only once the newest was read back from the disk and found whole."""
    old = broadcast([p.name for p in checkpoints(folder)][keep:], group)
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


def newest_good(folder: Path, say: Any = print, quarantine: bool = True) -> tuple[Path, dict[str, Any]] | None:
    """The newest checkpoint whose every byte is as it was saved, or None; a damaged one is named and put aside."""
    names = broadcast([p.name for p in checkpoints(folder)])
    for name in names:
        problem = verify(folder / name)
        if not problem:
            return folder / name, read_manifest(folder / name)
        if quarantine:
            put_aside(folder / name)
        say(f"checkpoint {name} is damaged ({problem}) and was put aside as .corrupt; trying an older one")
    if names or broadcast((folder / "latest").exists()):
        raise CheckpointError(f"no good checkpoint is left in {folder}. Fix: start a new run, or bring back a copy")
    return None


def put_aside(path: Path, group: Group = None) -> None:
    with agreed(f"renaming {path}", group=group):
        if rank() == 0:
            os.rename(path, path.with_name(f"{path.name}.corrupt-{uuid.uuid4().hex[:4]}"))


def verify(path: Path, group: Group = None) -> str:
    """What is damaged in a checkpoint, or "". The ranks share the files; all get the same answer.

    Only bytes that differ from what was saved are damage. A disk that does not answer is an error, and no reason to
    put anything aside.
    """
    problem = ""
    with agreed(f"reading {path}", group=group):
        try:
            mine = sorted(read_manifest(path)["files"].items())[rank() :: world_size()]
            with ThreadPoolExecutor(num_threads()) as pool:
                problem = next((p for p in pool.map(lambda item: damage(path / item[0], item[1]), mine) if p), "")
        except Damaged as error:
            problem = str(error)
        except FileNotFoundError as error:
            problem = f"{Path(error.filename).name} is missing"
    return next((p for p in gather(problem, group) if p), "")


def damage(file: Path, spec: dict[str, Any]) -> str:
    """What is wrong with one file, or ""."""
    size = file.stat().st_size
    if size != spec["size"]:
        return f"{file.name} has {size} bytes instead of {spec['size']}"
    return "" if shards.sha256(file) == spec["sha256"] else f"{file.name} does not match its checksum"


def read_manifest(path: Path) -> dict[str, Any]:
    try:
        content = json.loads((path / "manifest.json").read_bytes())
    except ValueError as error:  # not JSON, or not even text
        raise Damaged(f"manifest.json is not readable: {error}") from error
    if not isinstance(content, dict) or content.get("sha256") != manifest_hash(content):
        raise Damaged("manifest.json does not match its checksum")
    if content.get("format") != FORMAT:
        raise CheckpointError(f"{path} has the format {content.get('format')}, this version of dtrain reads {FORMAT}")
    return content


def load(path: Path, content: dict[str, Any], tensors: Mapping[str, Held]) -> None:
    """Fill what this rank holds, in place, from a checkpoint saved under any layout."""
    saved = content["tensors"]
    chunks = {name: chunks_of(held) for name, held in tensors.items()}
    # a pipeline's rank knows its own stage only: what the model has is what all of them have
    shapes: dict[str, list[int]] = {}
    for part in gather({name: list(c[0].whole_shape) for name, c in chunks.items() if c}):
        shapes |= part
    wrong = [f"{n} is not in it" for n in shapes if n not in saved]
    wrong += [f"{n} is only in it" for n in saved if n not in shapes]
    wrong += [
        f"{n} has shape {saved[n]['shape']} in it, {shape} here"
        for n, shape in shapes.items() if n in saved and saved[n]["shape"] != shape
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
    tensors = read_manifest(path)["tensors"]
    with shards.Reader(path, tensors) as reader:
        for name in sorted(n for n in tensors if n.startswith("model.")):
            yield name.removeprefix("model."), reader.whole(name)


def weights_sha256(path: Path) -> str:
    """A hash of the float32 weights: equal for every layout that holds the same values."""
    digest = hashlib.sha256()
    for name, tensor in weights(path):
        digest.update(f"{name}{list(tensor.shape)}".encode())
        digest.update(tensor.float().contiguous().reshape(-1).numpy().data)
    return digest.hexdigest()
