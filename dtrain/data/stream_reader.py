"""Read a stream sample by sample, from any cursor: a place in it that a checkpoint can keep."""

from __future__ import annotations

import logging
import zlib
from collections import deque
from collections.abc import Callable
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from dtrain.data.counter_rng import sample_keys
from dtrain.data.seeding import seed_draws
from dtrain.errors import CheckpointError, bad
from dtrain.runs.source_lines import at_return
from dtrain.util import json_state

log = logging.getLogger("dtrain")
START: dict[str, Any] = {"samples": 0, "epoch": 0, "offset": 0}  # the cursor of a new run
ENDED = object()
# The stream's own state is taken two samples before a cursor. After loading it, the first sample is only dropped: a
# generator draws for its beginning and for that sample from one key. The second is compared with what was read then.
BEFORE = 2


class Readable(Protocol):
    """What is read of a stream (stream.py)."""

    name: str
    make: Callable[[], Any]
    length: int | None
    restores: bool


class Reader:
    """Reads a stream in one process. Each epoch is read from an object that this process has built itself.

    An object of the parent process could hold an open file, whose position all processes would share.
    """

    def __init__(self, stream: Readable, seed: int) -> None:
        self.stream, self.seed = stream, seed
        self.items: Any = None  # an iterator
        self.data: Any = None
        self.samples = self.epoch = self.offset = 0  # of the whole run; the epoch, and the samples of it
        self.is_opened = False  # nothing has been read since
        self.keeps_states = stream.restores
        self.marks: deque[dict[str, Any]] = deque(maxlen=2)  # the newest states, and where they were taken
        self.block: tuple[int, int] | None = None  # of the samples whose keys are known
        self.keys = np.zeros(0, np.uint64)

    def seek(self, samples: int, cursor: dict[str, Any]) -> None:
        """Go to a position; `cursor` is a known one, of a checkpoint or after the newest batch."""
        if self.items is None or self.samples > samples:
            cursor = cursor if cursor["samples"] <= samples else START
            if not self._is_restored(cursor):
                self._read_again(cursor, samples)
        for _ in range(samples - self.samples):  # samples that a spike has passed over
            self.next()

    def _is_restored(self, cursor: dict[str, Any]) -> bool:
        """Go to a cursor by the stream's own state, if there is one and it gives the same sample."""
        if not self.keeps_states or "mark" not in cursor:
            return False
        try:
            why = self.restore(cursor)
        except Exception as error:
            why = f"{type(error).__name__}: {error}"
        if why:
            self.keeps_states = False
            log.warning("data=%s: its state from the checkpoint is of no use (%s)", self.stream.name, why)
        return not why

    def restore(self, cursor: dict[str, Any]) -> str:
        """Load the state before a cursor, and compare the last sample; return what is wrong, "" if nothing is."""
        mark = cursor["mark"]
        self.open(cursor["epoch"], mark["offset"], mark["state"])
        sample: Any = ENDED
        for _ in range(cursor["offset"] - mark["offset"]):
            sample = self._next()
        if fingerprint(sample) != cursor["last"]:
            return "after load_state_dict(state_dict()) it gives other samples"
        self.samples = cursor["samples"]
        self.marks.append(mark | {"epoch": self.epoch})
        return ""

    def _read_again(self, cursor: dict[str, Any], samples: int) -> None:
        """Read the epoch up to a cursor; what follows up to the position is read by `seek`."""
        self.open(cursor["epoch"])
        self.samples, count = cursor["samples"], cursor["offset"]
        what = "the %d samples of the epoch before the position"
        if not self.samples:
            what = "all %d samples since the first step, because the position in the stream is not known"
        if total := count + samples - self.samples:
            log.info(f"data=%s: reading and dropping {what}, which takes time", self.stream.name, total)
        sample: Any = None
        for _ in range(count):
            sample = self._next()
            if sample is ENDED:
                raise changed(self.stream.name, f"epoch {cursor['epoch'] + 1} has ended after {self.offset} samples")
        if count and cursor.get("last") not in (None, fingerprint(sample)):
            raise changed(self.stream.name, f"sample {count} of epoch {cursor['epoch'] + 1} is another one")

    def open(self, epoch: int, offset: int = 0, state: Any = None) -> None:
        """Begin an epoch, or continue it from a state."""
        data = self.stream.make()
        self.epoch, self.offset, self.is_opened = epoch, offset, True
        if callable(getattr(data, "set_epoch", None)):
            data.set_epoch(epoch)
        seed_draws(self._key(0))
        is_iterator = hasattr(data, "__next__")
        if state is not None and has_state(data) and not is_iterator:
            data.load_state_dict(json_state.decode(state))
        self.items, self.data = self._iterator(data), data
        if state is not None and has_state(self.items) and (is_iterator or not has_state(data)):
            self.items.load_state_dict(json_state.decode(state))

    def _iterator(self, data: Any) -> Any:
        try:
            return iter(data)
        except TypeError as error:
            if "non-iterator" not in str(error):
                raise
            kind, gave = type(data), str(error).rpartition("type ")[2].strip("'")
            rule = f"{kind.__name__}.__iter__ returned {'None' if gave == 'NoneType' else f'a {gave}'}, not an iterator"
            fix = "`yield sample` for each sample in it, or `return iter(samples)`"
            raise at_return(bad("data", self.stream.name, rule, fix), kind.__iter__) from error

    def next(self) -> Any:
        """Return the next sample; at the end of an epoch the first one of the next."""
        sample = self._next()
        if sample is ENDED:
            self._compare_length()
            self.open(self.epoch + 1)
            sample = self._next()
            if sample is ENDED:
                rule = f"it gives no samples in epoch {self.epoch + 1}: it can be iterated over only once"
                raise bad("data", self.stream.name, rule, "return a new iterator from __iter__ each time")
        self.samples += 1
        return sample

    def _next(self) -> Any:
        assert self.items is not None
        seed_draws(self._key(0 if self.is_opened else self.offset))
        self.is_opened = False
        sample = next(self.items, ENDED)
        self.offset += sample is not ENDED
        return sample

    def _compare_length(self) -> None:
        if self.stream.length not in (None, self.offset):
            what = "data=%s: epoch %d had %d samples, but len() says %d, by which train.epochs counts"
            log.warning(what, self.stream.name, self.epoch + 1, self.offset, self.stream.length)

    def _key(self, offset: int) -> int:
        """Return the seed of the random draws of a sample of this epoch."""
        block, number = divmod(offset, 1024)
        if self.block != (self.epoch, block):
            self.keys = sample_keys(self.seed, self.epoch, np.arange(block * 1024, (block + 1) * 1024))
            self.block = self.epoch, block
        return int(self.keys[number])

    def several(self, count: int) -> list[Any]:
        """Return the next samples of this epoch, fewer at its end."""
        samples: list[Any] = []
        while len(samples) < count and (sample := self._next()) is not ENDED:
            samples.append(sample)
        return samples

    def mark(self) -> None:
        """Keep the stream's own state for the next cursors. One that cannot be kept ends this, with a warning."""
        if not self.keeps_states:
            return
        try:
            self.take_state()
        except Exception as error:
            self.keeps_states = False
            self.marks.clear()
            what = "its state cannot be kept from now on, so a resume reads the samples of the epoch again"
            log.warning(f"data=%s: {what} (%s: %s)", self.stream.name, type(error).__name__, error)

    def take_state(self) -> None:
        holder: Any = self.data if has_state(self.data) else self.items
        state = json_state.encode_small(holder.state_dict())
        self.marks.append({"epoch": self.epoch, "offset": self.offset, "state": state})

    def cursor(self, last: Any) -> dict[str, Any]:
        """Return what restores this position. last: the newest sample, to find that a stream has changed."""
        found = {"samples": self.samples, "epoch": self.epoch, "offset": self.offset, "last": fingerprint(last)}
        for mark in reversed(self.marks):
            if mark["epoch"] == self.epoch and mark["offset"] <= self.offset - BEFORE:
                return found | {"mark": {"offset": mark["offset"], "state": mark["state"]}}
        return found


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
