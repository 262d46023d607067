"""Incremental saves: a file that has not changed since the save before is hard-linked instead of written again.

Each checkpoint folder stays complete: readers, copies and deletion need not know about links. Only bytes decide: a
rank compares a linked file on disk with the tensors that it holds, all of it, which also finds a file that has been
damaged. Everything else here is a guess that avoids reading in vain: which tensors get files of their own, and a
sample of each tensor.

The state is that of one process, so the first save after a restart writes everything.
"""

from __future__ import annotations

import hashlib
import logging
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dtrain.checkpoint import shards
from dtrain.checkpoint.manifest import Damaged
from dtrain.checkpoint.shards import Names
from dtrain.util.collective import failpoint
from dtrain.util.dtensor import Chunk

log = logging.getLogger("dtrain")
PIECES, PIECE_BYTES = 16, 1024  # of a sample


class Links:
    """What one rank knows about its files of the newest checkpoint. `full_every`: every so many saves link nothing."""

    def __init__(self, full_every: int) -> None:
        self.full_every = full_every
        self.newest: Path | None = None
        self.specs: dict[str, Any] = {}  # the manifest's entries of this rank's files in `newest`
        self.content: dict[str, list[Names]] = {}  # what each of these files holds
        self.samples: dict[Names, bytes] = {}
        self.changed: set[Names] = set()  # has changed since the first save: not expected to stay the same again
        self.num_saves = self.num_linked_saves = 0
        self.linked: dict[str, int] = {}  # files of the current save that are links, with their sizes

    def steady(self, chunks: Mapping[Names, Chunk]) -> set[Names]:
        """Return the chunks that are expected to stay as they are, by name."""
        if self.num_saves >= 2:
            return {names for names in chunks if names in self.samples and names not in self.changed}
        trained = {name.split(".", 1)[1].rpartition(".")[0] for name, _ in chunks if name.startswith("optim.")}
        weights = {names for names in chunks if names[0].startswith("model.")}
        return {names for names in weights if names[0].removeprefix("model.") not in trained} - self.changed

    def begin(self, files: Iterable[Mapping[Names, Chunk]]) -> None:
        """Take samples of what will be saved, and compare them with those of the save before."""
        samples = {names: sample(chunk.values) for chunks in files for names, chunk in chunks.items()}
        self.changed |= {names for names, new in samples.items() if self.samples.get(names, new) != new}
        self.samples, self.linked = samples, {}

    def link(self, target: Path, chunks: Mapping[Names, Chunk]) -> dict[str, Any] | None:
        """Link a file of the newest checkpoint if it holds exactly these chunks; return its entry, or None."""
        spec: dict[str, Any] | None = self.specs.get(target.name)
        full = self.num_linked_saves + 1 >= self.full_every
        if full or self.newest is None or spec is None or self.content[target.name] != list(chunks):
            return None
        if not self.changed.isdisjoint(chunks):
            return None
        try:
            os.link(self.newest / target.name, target, follow_symlinks=False)
        except OSError as error:  # the file is gone, or the file system has no hard links
            if not isinstance(error, FileNotFoundError):
                log.info("checkpoint.incremental: %s cannot be linked (%s), so it is written", target.name, error)
            return None
        failpoint("save.link")
        if not self._holds(target, chunks, spec):
            os.unlink(target)  # never write to it: that would change the checkpoint that shares it
            return None
        self.linked[target.name] = spec["size"]
        return spec

    def end(self, newest: Path | None, specs: dict[str, Any], files: Mapping[str, Mapping[Names, Chunk]]) -> None:
        """Note the checkpoint that the next save may link to; None if there is none that this process wrote."""
        self.newest, self.specs = newest, specs
        self.content = {file: list(chunks) for file, chunks in files.items()}
        self.num_saves += 1
        self.num_linked_saves = self.num_linked_saves + 1 if self.linked else 0

    def _holds(self, file: Path, chunks: Mapping[Names, Chunk], spec: dict[str, Any]) -> bool:
        """Return whether a file has exactly these chunks, on disk; note those that have changed."""
        tensors = {key: chunk.values for (_, key), chunk in chunks.items()}
        try:
            different = shards.differing(file, tensors, shards.metadata(chunks))
            if different and shards.sha256(file) != spec["sha256"]:
                raise Damaged("it does not match its checksum")
        except (Damaged, OSError) as error:
            log.warning("%s of the checkpoint before is damaged, and is written again: %s", file.name, error)
            return False
        self.changed |= {names for names in chunks if names[1] in different}
        return not different


def sample(values: Tensor) -> bytes:
    """Return a hash of some bytes of a tensor: two that differ prove a change, two that are equal prove nothing."""
    flat = values.detach().reshape(-1).view(torch.uint8)
    if len(flat) > PIECES * PIECE_BYTES:
        rows = flat[: len(flat) // PIECES * PIECES].view(PIECES, -1)
        flat = torch.cat([rows[:, :PIECE_BYTES].reshape(-1), flat[-PIECE_BYTES:]])
    return hashlib.sha256(flat.cpu().numpy().data).digest()
