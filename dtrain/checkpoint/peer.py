"""A copy of the newest state in the memory of the hosts (checkpoint.peer), for a restart without the disk.

Each rank writes what it would save into /dev/shm of its host, in the format of a checkpoint. If there are several
hosts, it also sends these files to a rank of the next host. So the files outlive the ranks, and all of them are still
there if one host is lost. A restart looks for the newest step whose files the hosts have together; each host fetches
what it lacks from the others, and everything is verified like a checkpoint on disk.

Every method is collective: all ranks call it. What fails here never ends the run: the checkpoints on disk remain.
"""

from __future__ import annotations

import collections
import contextlib
import logging
import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from dtrain.checkpoint import integrity, manifest, ownership, shards
from dtrain.checkpoint.manifest import Damaged, Manifest
from dtrain.checkpoint.rank_files import Files, in_parallel, write_files
from dtrain.errors import CheckpointError
from dtrain.runs import memory
from dtrain.runs.folder import checkpoints
from dtrain.runs.protocol import pid_namespace
from dtrain.util.collective import (
    Group,
    agreed,
    all_problems,
    exchange,
    failpoint,
    from_rank_0,
    gather,
    rank,
    wait_for_peers,
)
from dtrain.util.host_memory import free_bytes

log = logging.getLogger("dtrain")
PIECE = 256 * 2**20  # bytes of one send


class Transfer(NamedTuple):
    """A file that one rank sends to another, which has created it in its full size."""

    source: int
    target: int
    path: str  # relative to the folder of the copies
    size: int


class PeerCopies:
    """The copies of one run. `host` and `root` are for tests, which play several hosts on one machine."""

    def __init__(self, run_dir: Path, group: Group = None, host: str = "", root: Path | None = None) -> None:
        self.run_dir, self.group = run_dir, group
        self.folder = memory.folder(run_dir, root)
        self.hosts: list[str] = gather(host or pid_namespace(), group)
        self.local = [r for r, other in enumerate(self.hosts) if other == self.hosts[rank()]]
        self.leads = rank() == self.local[0]  # does for its host what one rank must do
        self.is_on, self.is_checked = True, False

    # ---- save ------------------------------------------------------------------------------------------------

    def save(self, step: int, files: Files, index: dict[str, Any], meta: dict[str, Any], group: Group = None) -> bool:
        """Replace the copy by the state of this step; return whether that succeeded."""
        if not self.is_on:
            return False
        try:
            self._save(step, files, index, meta, group)
        except CheckpointError as error:
            self.is_on = False  # on all ranks: they agreed on the error
            log.warning("checkpoint.peer is off from now on: %s", error)
            self.remove()
        return self.is_on

    def _save(self, step: int, files: Files, index: dict[str, Any], meta: dict[str, Any], group: Group) -> None:
        final = self.folder / f"step-{step:08d}"
        attempt, what = self.folder / f".attempt-{step}", f"copying step {step} to {self.folder}"
        with agreed(what, group=group):
            if not self.is_checked:
                self._check_room(sum(c.nbytes for chunks in files.values() for c in chunks.values()))
                self.is_checked = True
            if self.leads:
                memory.create(self.folder)
                for stale in (*self.folder.glob(".attempt-*"), final):
                    shutil.rmtree(stale, ignore_errors=True)
                attempt.mkdir()
        specs: dict[str, Any] = {}
        with agreed(what, attempt, group):
            specs = write_files(attempt, files)
            failpoint("peer.own")
        self._send_to_next_host(attempt, specs, what, group)
        failpoint("peer.sent")
        of_all = {file: spec for by_rank in gather(specs, group) for file, spec in by_rank.items()}
        values = from_rank_0(
            lambda: manifest.content(
                step, {"run": ownership.run_id(self.run_dir / "checkpoints")} | meta, of_all, index
            ),
            what,
            group,
        )
        with agreed(what, attempt, group):
            if self.leads:
                manifest.write(attempt, values)
                failpoint("peer.manifest")
                os.rename(attempt, final)
        with agreed(what, group=group):  # all hosts have the new one
            if self.leads:
                for old in checkpoints(self.folder):
                    if old != final:
                        failpoint("peer.prune")
                        shutil.rmtree(old)

    def _check_room(self, own: int) -> None:
        """Refuse copies that the memory of this host cannot hold: the kernel would end a process to make room."""
        copies = 2 * min(len(set(self.hosts)), 2)  # the old one stays until the new one is complete
        needed, usage = own * len(self.local) * copies, os.statvfs(self.folder.parent.parent)
        free = min(usage.f_bavail * usage.f_frsize, 0.9 * (free_bytes() or 2**62))
        if needed > free:
            have = f"{needed / 2**30:.1f} GiB are needed in memory, {free / 2**30:.1f} GiB are free"
            raise CheckpointError(f"{have} in {self.folder.parent.parent}")

    def _send_to_next_host(self, attempt: Path, specs: dict[str, Any], what: str, group: Group) -> None:
        if len(set(self.hosts)) == 1:
            return
        keeper = next_host(self.hosts, rank())
        arriving = exchange({keeper: specs}, group)
        sent = [(rank(), keeper, specs), *((sender, rank(), theirs) for sender, theirs in sorted(arriving.items()))]
        transfers = [
            Transfer(source, target, f"{attempt.name}/{file}", spec["size"])
            for source, target, files in sent for file, spec in files.items()
        ]  # fmt: skip
        self._transfer(transfers, what, group)
        with agreed(what, attempt, group):
            for theirs in arriving.values():
                for file, spec in theirs.items():
                    if problem := integrity.damage(attempt / file, spec):
                        raise CheckpointError(f"{problem} after it was sent")

    def _transfer(self, transfers: Sequence[Transfer], what: str, group: Group) -> None:
        """Send and receive files; `transfers` has those of this rank, in the same order on both sides."""
        with agreed(what, group=group):
            for t in transfers:
                if t.target == rank():
                    with open(self.folder / t.path, "xb") as file:
                        os.posix_fallocate(file.fileno(), 0, t.size)  # a mapped page without memory would be a SIGBUS
        works: list[tuple[Any, Tensor]] = []
        tags = collections.Counter[tuple[int, int]]()
        for t in transfers:
            sends = t.source == rank()
            for piece in pieces(self.folder / t.path, writable=not sends):
                call, other = (dist.isend, t.target) if sends else (dist.irecv, t.source)
                works.append((call(piece, other, group=group, tag=tags[t[:2]]), piece))
                tags[t[:2]] += 1
        wait_for_peers(work for work, _ in works)

    # ---- load ------------------------------------------------------------------------------------------------

    def newest(
        self, at_least: int, needed: tuple[str, ...] = (), say: Callable[[str], object] = log.warning
    ) -> tuple[Path, Manifest] | None:
        """Return the newest good copy that is not older than this step, complete on every host; or None."""
        here = self._inventory() if self.leads else {}
        found = gather(here, self.group)
        steps = sorted({step for held in found for step in held if step >= at_least}, reverse=True)
        for step in steps:
            path = self.folder / f"step-{step:08d}"
            try:
                self._complete(path, {r: held[step] for r, held in enumerate(found) if step in held})
                problem = self._verify(path, needed, step)
            except CheckpointError as error:
                problem = str(error)
            if not problem:
                return path, manifest.read(path)
            say(f"the copy of step {step} in memory is not used: {problem}")
        return None

    def _inventory(self) -> dict[int, tuple[str, list[str]]]:
        """Return the copies on this host: step → the manifest's checksum, and the files that are there in full size."""
        found = {}
        for path in checkpoints(self.folder) if memory.is_private(self.folder) else ():
            try:
                saved, digest = manifest.read(path), shards.sha256(path / "manifest.json")
                sizes = {p.name: p.stat().st_size for p in path.iterdir()}
            except (OSError, CheckpointError):
                continue
            full = [file for file, spec in saved.files.items() if sizes.get(file) == spec["size"]]
            found[int(path.name[5:])] = (digest, full)
        return found

    def _complete(self, path: Path, held: dict[int, tuple[str, list[str]]]) -> None:
        """Fetch from other hosts what this one lacks. `held`: by rank, of those that lead their host."""
        what = f"collecting {path}"
        if len({digest for digest, _ in held.values()}) > 1:
            raise CheckpointError("the hosts have different copies of it")
        first = min(held)
        text = ""
        if rank() == first:
            with contextlib.suppress(OSError):  # then nobody can parse it
                text = (path / "manifest.json").read_text()
        texts = gather(text, self.group)
        leaders = sorted({self.hosts.index(host) for host in self.hosts})
        sizes: dict[str, int] = {}
        with agreed(what, group=self.group):
            if self.leads and rank() not in held:
                memory.create(self.folder)
                shutil.rmtree(path, ignore_errors=True)
                path.mkdir()
                (path / "manifest.json").write_text(texts[first])
            if self.leads:
                sizes = {file: spec["size"] for file, spec in manifest.read(path).files.items()}
                lost = sizes.keys() - {file for _, files in held.values() for file in files}
                if lost:
                    raise Damaged(f"no host has {min(lost)}")
                for file in sizes.keys() - set(held.get(rank(), ("", []))[1]):
                    (path / file).unlink(missing_ok=True)
        transfers = []
        for file, size in sorted(sizes.items()):
            source = min(r for r, (_, files) in held.items() if file in files)
            missing = [r for r in leaders if file not in held.get(r, ("", []))[1]]
            transfers += [Transfer(source, target, f"{path.name}/{file}", size) for target in missing]
        self._transfer([t for t in transfers if rank() in (t.source, t.target)], what, self.group)

    def _verify(self, path: Path, needed: tuple[str, ...], step: int) -> str:
        """Return what is damaged on any host, or "". The ranks of a host share its files."""
        problem = ""
        with agreed(f"reading {path}", group=self.group):
            try:
                saved, run = manifest.read(path), ownership.run_id(self.run_dir / "checkpoints")
                if saved["step"] != step or ownership.differs(saved.meta.get("run"), run):
                    raise Damaged("it belongs to another step or run")
                manifest.check_needed(saved, needed)
                mine = sorted(saved.files_of)[self.local.index(rank()) :: len(self.local)]
                for writer in mine:
                    shards.check_files(path, saved, writer)
                files = [file for writer in mine for file in saved.files_of[writer]]
                checked = in_parallel(lambda file: integrity.damage(path / file, saved.files[file]), files)
                problem = next((p for p in checked if p), "")
            except Damaged as error:
                problem = str(error)
        return next(iter(all_problems(problem, self.group)), "")

    def remove(self) -> None:
        """Remove the copies: the run has ended, and its last state is on disk."""
        if self.leads and memory.is_private(self.folder):
            shutil.rmtree(self.folder, ignore_errors=True)


def next_host(hosts: Sequence[str], sender: int) -> int:
    """Return the rank of the next host that keeps a copy for a rank."""
    names = list(dict.fromkeys(hosts))
    mine = [r for r, host in enumerate(hosts) if host == hosts[sender]]
    following = names[(names.index(hosts[sender]) + 1) % len(names)]
    theirs = [r for r, host in enumerate(hosts) if host == following]
    return theirs[mine.index(sender) % len(theirs)]


def pieces(path: Path, writable: bool) -> Iterator[Tensor]:
    """Yield a file's bytes as tensors that share its memory."""
    mapped = np.memmap(path, np.uint8, "r+" if writable else "c")  # c: torch wants it writable, the file stays the same
    for begin in range(0, len(mapped), PIECE):
        yield torch.from_numpy(mapped[begin : begin + PIECE])
