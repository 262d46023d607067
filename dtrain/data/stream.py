"""Read a stream, data that can only be iterated, from an exact position.

A position is the number of samples consumed, like that of every run. A stream is read in its own order, each epoch from
a newly built object, and before each sample the global random generators are seeded by (seed, epoch, number of the
sample). So what is read depends on the seed and the position only. A resume restores a position by the stream's own
state_dict and load_state_dict, if they give back the same samples, otherwise it reads the samples before the position
again and drops them.
"""

from __future__ import annotations

import logging
import multiprocessing
import pickle
import zlib
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from dtrain.data.collate import Batch, collated, counts_targets
from dtrain.data.counter_rng import sample_keys
from dtrain.data.prefetch import portable
from dtrain.data.seeding import own_draws, seed_draws
from dtrain.errors import CheckpointError, bad
from dtrain.runs.protocol import die_with_parent
from dtrain.util import json_state

log = logging.getLogger("dtrain")
TRIED = 8  # samples after which the state is tried, and how many must then be the same
START: dict[str, Any] = {"samples": 0, "epoch": 0, "offset": 0}  # of a place: what a checkpoint keeps
ENDED = object()
# in the state of Hugging Face data that are shuffled: after loading it, only the first samples are the same
UNSAVED = "BufferShuffledExamplesIterable"


class Stream:
    """One split of a user's data that has no numbers for its samples: __iter__ only.

    make: builds it again, for each epoch. Nothing is read in this process: what a user's code opens or starts while it
    iterates (files, threads) must not be forked with it.
    """

    is_stream = True
    noted: dict[str, None]

    def __init__(
        self,
        name: str,
        data: Any,
        make: Callable[[], Any],
        collate: Callable[[list[Any]], Any] | None = None,
        notes: dict[str, None] | None = None,
    ) -> None:
        self.name, self.data, self.make, self.collate = name, data, make, collate
        self.noted = {} if notes is None else notes
        self.noted["is read in its order, by one process of each rank, whatever train.loader_workers is"] = None
        self.first, self.fingerprint, self.restores, found = in_child(self._look)
        self.noted |= found
        self.is_masked = getattr(data, "masked", None)

    @property
    def notes(self) -> list[str]:
        return list(self.noted)

    @property
    def masked(self) -> bool:
        return bool(counts_targets(self.first[1]) if self.is_masked is None else self.is_masked)

    @property
    def length(self) -> int | None:
        """The samples of an epoch, if the stream says how many."""
        try:
            return len(self.data)
        except (TypeError, NotImplementedError):
            return None

    def _look(self) -> tuple[Batch, str, bool, dict[str, None]]:
        """Read the first samples, and try whether the stream's own state restores its position."""
        reader = Reader(self, seed=0)
        reader.open(0)
        samples = reader.several(TRIED)
        if not samples:
            raise bad("data", self.name, "it gives no samples: iterating over it ends at once", "check its path")
        notes: dict[str, None] = {}
        first = collated(samples[:1], self.collate, notes)
        crcs = [fingerprint(sample) for sample in samples]
        why = self._tried(reader)
        slow = "a resume reads the samples before its position again and drops them, which takes as long as before"
        notes["a resume restores its state_dict()" if not why else f"{slow} ({why})"] = None
        return first, format(zlib.crc32(repr(crcs).encode()), "08x"), not why, notes

    def _tried(self, reader: Reader) -> str:
        """Return why its state_dict is of no use; "" if it restores the position exactly."""
        try:
            state = reader.state()
            if state is None:
                return "it has no state_dict() and load_state_dict()"
            if UNSAVED in repr(state):
                return "its state does not keep the shuffle buffer"
            expected = [fingerprint(sample) for sample in reader.several(TRIED)]
            again = Reader(self, seed=0)
            again.is_used = True  # as in a process that resumes
            again.open(0, reader.offset - len(expected), state)
            found = [fingerprint(sample) for sample in again.several(TRIED)]
        except Exception as error:
            return f"its state cannot be restored: {type(error).__name__}: {error}"
        return "" if found == expected else "after load_state_dict(state_dict()) it gives other samples"

    def head(self, count: int) -> list[Any]:
        """Return the first samples, for an evaluation: all, if there are fewer."""

        def read() -> list[Any]:
            reader = Reader(self, seed=0)
            reader.open(0)
            return reader.several(count)

        return list(in_child(read))


class Reader:
    """Reads a stream in one process, sample by sample."""

    def __init__(self, stream: Stream, seed: int) -> None:
        self.stream, self.seed = stream, seed
        self.is_used = False  # the stream's object has been iterated over: the next one is a new one
        self.items: Any = None  # an iterator
        self.data: Any = None
        self.samples = self.epoch = self.offset = 0  # of the whole run; the epoch, and the samples of it
        self.keys = np.zeros(0, np.uint64)

    def seek(self, samples: int, place: dict[str, Any]) -> None:
        """Go to a position; `place` is a known one, of a checkpoint or of the newest batch."""
        if self.items is None or self.samples > samples:
            place = place if place["samples"] <= samples else START
            self.samples = place["samples"]
            state = place.get("state") if self.stream.restores else None
            if state is not None:
                self.open(place["epoch"], place["offset"], state)
            else:
                self.open(place["epoch"])
                self._drop(place)
        for _ in range(samples - self.samples):  # samples that a spike has passed over
            self.next()

    def _drop(self, place: dict[str, Any]) -> None:
        """Read up to a place of the epoch without a state."""
        count = place["offset"]
        if not count:
            return
        what = "reading and dropping the %d samples of the epoch before the position, which takes time"
        log.info(f"data=%s: {what}", self.stream.name, count)
        sample: Any = None
        for _ in range(count):
            sample = self._next()
            if sample is ENDED:
                raise changed(self.stream.name, f"epoch {place['epoch'] + 1} has ended after {self.offset} samples")
        if place.get("last") not in (None, fingerprint(sample)):
            raise changed(self.stream.name, f"sample {count} of epoch {place['epoch'] + 1} is another one")

    def open(self, epoch: int, offset: int = 0, state: Any = None) -> None:
        """Begin an epoch, or continue it from a state."""
        data = self.stream.make() if self.is_used or epoch else self.stream.data
        self.is_used, self.epoch, self.offset = True, epoch, offset
        if callable(getattr(data, "set_epoch", None)):
            data.set_epoch(epoch)
        self.keys = np.zeros(0, np.uint64)
        seed_draws(self._key())
        is_iterator = hasattr(data, "__next__")
        if state is not None and has_state(data) and not is_iterator:
            data.load_state_dict(json_state.decode(state))
        self.items, self.data = iter(data), data
        if state is not None and has_state(self.items) and (is_iterator or not has_state(data)):
            self.items.load_state_dict(json_state.decode(state))

    def next(self) -> Any:
        """Return the next sample; at the end of an epoch the first one of the next."""
        sample = self._next()
        if sample is ENDED:
            self.open(self.epoch + 1)
            sample = self._next()
            if sample is ENDED:
                rule = f"it gives no samples in epoch {self.epoch + 1}: it can be iterated over only once"
                raise bad("data", self.stream.name, rule, "return a new iterator from __iter__ each time")
        self.samples += 1
        return sample

    def _next(self) -> Any:
        assert self.items is not None
        seed_draws(self._key())
        sample = next(self.items, ENDED)
        self.offset += sample is not ENDED
        return sample

    def _key(self) -> int:
        """Return the seed of the random draws of the next sample."""
        block, place = divmod(self.offset, 1024)
        if not len(self.keys) or not place:
            self.keys = sample_keys(self.seed, self.epoch, np.arange(block * 1024, (block + 1) * 1024))
        return int(self.keys[place])

    def several(self, count: int) -> list[Any]:
        """Return the next samples of this epoch, fewer at its end."""
        samples: list[Any] = []
        while len(samples) < count and (sample := self._next()) is not ENDED:
            samples.append(sample)
        return samples

    def state(self) -> Any:
        """Return the stream's own state as JSON; None: it has none."""
        holder: Any = self.data if has_state(self.data) else self.items
        return json_state.encode(holder.state_dict()) if has_state(holder) else None

    def place(self, last: Any) -> dict[str, Any]:
        """Return what restores this position. last: the newest sample, to find that a stream has changed."""
        found = {"samples": self.samples, "epoch": self.epoch, "offset": self.offset, "last": fingerprint(last)}
        return found | ({"state": self.state()} if self.stream.restores else {})


def has_state(thing: Any) -> bool:
    return all(callable(getattr(thing, name, None)) for name in ("state_dict", "load_state_dict"))


def changed(name: str, what: str) -> CheckpointError:
    return CheckpointError(
        f"data={name}: the stream is not what this run has read before: {what}. Fix: restore the old data, or start a "
        "new run from the checkpoint: fork=RUN data=…"
    )


def fingerprint(sample: Any) -> int:
    """Return a checksum of a sample: of its tensors, arrays, images, numbers and text."""
    found = 0
    for leaf in pytree.tree_leaves(sample):
        if isinstance(leaf, Tensor):
            leaf = leaf.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
        elif type(leaf).__module__.partition(".")[0] == "PIL":
            leaf = np.asarray(leaf)
        if isinstance(leaf, (np.ndarray, np.generic)) and leaf.dtype != object:
            data = np.ascontiguousarray(leaf).tobytes()
        else:
            plain = isinstance(leaf, (bool, int, float, str, bytes, type(None)))
            data = repr(leaf if plain else type(leaf).__name__).encode()
        found = zlib.crc32(data, found)
    return found


def in_child(function: Callable[[], Any]) -> Any:
    """Call a function in a forked process, and return what it returns."""
    context = multiprocessing.get_context("fork")
    here, there = context.Pipe(duplex=False)

    def work() -> None:
        parent = multiprocessing.parent_process()
        die_with_parent(parent.pid if parent else None)
        try:
            with own_draws():
                answer = pickle.dumps((function(), None))
        except Exception as error:
            answer = pickle.dumps((None, portable(error)))
        there.send_bytes(answer)

    child = context.Process(target=work)
    child.start()
    there.close()
    try:
        answer, error = pickle.loads(here.recv_bytes())  # of our own process
    except EOFError as ended:
        child.join()
        raise RuntimeError(
            f"data: the process that read the first samples ended with exit code {child.exitcode}"
        ) from ended
    child.join()
    if error is not None:
        raise error
    return answer
