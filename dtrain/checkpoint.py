"""Checkpoints that move between strategies and world sizes, and that no crash or flipped bit can turn into a lie.

`checkpoints/step-00000100/` holds safetensors shards and `manifest.json`, which lists for every tensor its whole
shape and the chunks it was saved in, for every file its size and sha256, and the state that is no tensor. Nothing is
pickled. A save goes into a fresh folder: shards, then the manifest, all flushed, then one rename, then `latest`.
So a folder with the right name is a whole checkpoint, at whatever moment the machine died.

Every function here that takes part in a run is collective: all ranks call it, and all agree on what came out.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import shutil
import signal
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import Tensor

from dtrain import shards
from dtrain.rundir import checkpoints
from dtrain.shards import Chunk, Held, chunks_of

log = logging.getLogger("dtrain")
FORMAT = "dtrain-1"


class CheckpointError(RuntimeError):
    """A checkpoint could not be saved or used; the message says which, why, and what to do."""


class Damaged(CheckpointError):
    """The bytes are not the ones that were saved."""


# ---- save ----------------------------------------------------------------------------------------------------


def save(folder: Path, step: int, tensors: Mapping[str, Held], meta: dict[str, Any], keep: int) -> Path:
    """Save under `folder`, in agreement: when this returns, on any rank, the checkpoint is on disk and `latest`."""
    final = folder / f"step-{step:08d}"
    attempt = folder / broadcast(f".attempt-{step}-{uuid.uuid4().hex[:8]}")
    failpoint("save.begin")
    if broadcast(final.exists()):
        if not verify(final):  # an earlier life of this run saved this very step, and it is as good
            return final
        put_aside(final)
    # one name in a rank's file may stand for several boxes of a tensor: the first has the name itself
    chunks = {
        (name, name if i == 0 else f"{name}#{i}"): chunk
        for name, held in tensors.items() for i, chunk in enumerate(chunks_of(held))
    }  # fmt: skip
    assert len({key for _, key in chunks}) == len(chunks), "a name with # in it is another's second box"
    with agreed(f"saving {final}", clean_up=attempt):
        if rank() == 0:
            for stale in folder.glob(".attempt-*"):  # of a run that was killed while it saved
                shutil.rmtree(stale, ignore_errors=True)
            attempt.mkdir(parents=True)
    with agreed(f"saving {final}", clean_up=attempt):
        file = f"rank-{rank():05d}.safetensors"
        mine = {names: chunks[names] for names in assign_writers(chunks)}
        size, digest = shards.write(attempt / file, {key: c.values for (_, key), c in mine.items()}, {"format": "pt"})
        failpoint("save.shard")
    written = [
        {"name": name, "whole": c.whole_shape, "dtype": str(c.values.dtype).removeprefix("torch."),
         "chunk": {"file": file, "offset": c.offset, "shape": c.shape} | ({"key": key} if key != name else {})}
        for (name, key), c in mine.items()
    ]  # fmt: skip
    reports = gather({"file": file, "size": size, "sha256": digest, "written": written})
    with agreed(f"saving {final}", clean_up=attempt):
        if rank() == 0:
            write_manifest(attempt, manifest(step, reports, meta))
            failpoint("save.manifest")
            os.rename(attempt, final)
            shards.fsync_folder(folder)
            failpoint("save.rename")
            point_latest(folder, final.name)
            failpoint("save.latest")
    prune(folder, final, keep)
    return final


def assign_writers(chunks: dict[tuple[str, str], Chunk]) -> list[tuple[str, str]]:
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


def prune(folder: Path, newest: Path, keep: int) -> None:
    """Delete all but the newest `keep`, but only once the newest was read back from the disk and found whole."""
    old = broadcast([p.name for p in checkpoints(folder)][keep:])
    if not old:
        return
    problem = verify(newest)
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


def put_aside(path: Path) -> None:
    with agreed(f"renaming {path}"):
        if rank() == 0:
            os.rename(path, path.with_name(f"{path.name}.corrupt-{uuid.uuid4().hex[:4]}"))


def verify(path: Path) -> str:
    """What is damaged in a checkpoint, or "". The ranks share the files; all get the same answer.

    Only bytes that differ from what was saved are damage. A disk that does not answer is an error, and no reason to
    put anything aside.
    """
    problem = ""
    with agreed(f"reading {path}"):
        try:
            for name, spec in sorted(read_manifest(path)["files"].items())[rank() :: world_size()]:
                file = path / name
                if file.stat().st_size != spec["size"]:
                    problem = f"{name} has {file.stat().st_size} bytes instead of {spec['size']}"
                elif shards.sha256(file) != spec["sha256"]:
                    problem = f"{name} does not match its checksum"
        except Damaged as error:
            problem = str(error)
        except FileNotFoundError as error:
            problem = f"{Path(error.filename).name} is missing"
    return next((p for p in gather(problem) if p), "")


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


# ---- agreement -----------------------------------------------------------------------------------------------


def rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def world_size() -> int:
    return dist.get_world_size() if dist.is_initialized() else 1


def gather(value: Any) -> list[Any]:
    """Every rank's value, on every rank."""
    values: list[Any] = [value] * world_size()
    if world_size() > 1:
        dist.all_gather_object(values, value)
    return values


def broadcast(value: Any) -> Any:
    """Rank 0's value, on every rank."""
    box = [value]
    if world_size() > 1:
        dist.broadcast_object_list(box, src=0)
    return box[0]


@contextmanager
def agreed(what: str, clean_up: Path | None = None) -> Iterator[None]:
    """Run the block on every rank; if it failed on one, fail on all with that error, leaving nothing half done."""
    problem, cause = "", None
    try:
        yield
    except (OSError, CheckpointError) as error:
        problem, cause = f"rank {rank()}: {error}", error
    problems = [p for p in gather(problem) if p]
    if problems:
        if rank() == 0 and clean_up is not None:
            shutil.rmtree(clean_up, ignore_errors=True)
        gather(None)  # only then do the others go on: on a full disk, that room is needed to note the failure
        raise CheckpointError(f"{what} failed on {problems[0]}") from cause


def failpoint(name: str) -> None:
    """For crash tests: die here, as from a power loss, at the n-th passage when DTRAIN_FAILPOINT is "name:n"."""
    wanted, _, count = os.environ.get("DTRAIN_FAILPOINT", "").partition(":")
    if wanted == name:
        os.environ["DTRAIN_FAILPOINT"] = f"{name}:{int(count or 1) - 1}"
        if int(count or 1) <= 1:
            os.kill(os.getpid(), signal.SIGKILL)
