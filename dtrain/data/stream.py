"""Streams: data that can only be iterated, read from an exact position.

A position is the number of samples consumed, like that of every run. A stream is read in its own order, each epoch from
a newly built object, and before each sample the global random generators are seeded by (seed, epoch, number of the
sample). So what is read depends on the seed and the position only. A resume restores a position by the stream's own
state_dict and load_state_dict, if they give back the same samples, otherwise it reads the samples before the position
again and drops them (stream_reader.py).
"""

from __future__ import annotations

import multiprocessing
import os
import pickle
import zlib
from collections.abc import Callable
from typing import Any

import torch

from dtrain.data.collate import Batch, collated, counts_targets
from dtrain.data.prefetch import portable
from dtrain.data.seeding import own_draws
from dtrain.data.stream_reader import BEFORE, Reader, fingerprint, has_state
from dtrain.errors import bad
from dtrain.runs.protocol import die_with_parent
from dtrain.runs.source_lines import at_return

LOOKED_AT = 8  # samples whose fingerprint all ranks must share, and after which a restored state must give the same
TRIED_AT = (8, 2, 13, 5)  # where the state is tried, each in another epoch
MOST_DEPTH = 32  # of transformations of Hugging Face data


class Stream:
    """One split of a user's data that has no numbers for its samples: __iter__ only.

    data: only its type and its length are used. make: builds it again, in each process and for each epoch. Nothing is
    read in this process, because forked processes share the position of an open file. reader: see adapt.reader_of.
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
        reader: Any = None,
    ) -> None:
        self.name, self.make, self.collate, self.reader = name, make, collate, reader
        self.length = length_of(data)  # samples of an epoch, if the stream says how many
        self.is_masked = getattr(data, "masked", None)
        self.noted = {} if notes is None else notes
        self.noted["is read in its order, by one process of each rank, whatever train.loader_workers is"] = None
        self.restores = True  # until it is tried
        files = positions_of_files()
        self.first, self.fingerprint, self.restores, found = in_child(self._look)
        self.noted |= found
        moved = [path for (number, path), at in positions_of_files().items() if files.get((number, path), at) != at]
        for path in moved:
            rule = f"reads {path}, which was opened before: all processes would share its position"
            raise bad("data", name, rule, "open the file in the function that data= names, or in __iter__")

    @property
    def notes(self) -> list[str]:
        return list(self.noted)

    @property
    def masked(self) -> bool:
        return bool(counts_targets(self.first[1]) if self.is_masked is None else self.is_masked)

    def _look(self) -> tuple[Batch, str, bool, dict[str, None]]:
        """Read the first samples, and try whether the stream's own state restores its position."""
        reader = Reader(self, seed=0)
        try:
            reader.open(0)
            self._refuse_one_iterator(reader.data)
            samples = reader.several(LOOKED_AT)
        except AssertionError as error:
            if "daemonic processes" not in str(error):
                raise
            rule = "starts processes while it is read, and is read in a process of its own that may not"
            raise bad("data", self.name, rule, "DataLoader(…, num_workers=0) in its __iter__, or threads") from error
        if not samples:
            rule = "it gives no samples: iterating over it ends at once"
            raise at_return(bad("data", self.name, rule, "check what it reads: a path, or a filter"), self.reader)
        notes: dict[str, None] = {}
        first = collated(samples[:1], self.collate, notes, self.name, self.reader)
        crcs = [fingerprint(sample) for sample in samples]
        why = self._tried(reader)
        slow = "a resume reads the samples before its position again and drops them, which takes as long as before"
        notes["a resume restores its state_dict()" if not why else f"{slow} ({why})"] = None
        return first, format(zlib.crc32(repr(crcs).encode()), "08x"), not why, notes

    def _refuse_one_iterator(self, data: Any) -> None:
        if hasattr(data, "__next__") and self.make() is data:
            rule = f"gives the same {type(data).__name__} each time, which can be iterated over only once"
            raise bad("data", self.name, rule, "make it in the function that data= names, not at the top of the file")

    def _tried(self, reader: Reader) -> str:
        """Return why its state is of no use; "" if it restores the position exactly, in each of some epochs."""
        if not has_state(reader.data) and not has_state(reader.items):
            return "it has no state_dict() and load_state_dict()"
        if shuffles(reader.data):
            return "its state does not keep the shuffle buffer"
        num_tried = 0
        try:
            for epoch, offset in enumerate(TRIED_AT):
                reader.open(epoch)
                reader.several(offset - BEFORE)
                reader.take_state()
                last = reader.several(BEFORE)
                if len(last) < BEFORE:
                    continue
                cursor = reader.cursor(last[-1])
                expected = [fingerprint(sample) for sample in reader.several(LOOKED_AT)]
                again = Reader(self, reader.seed)
                why = again.restore(cursor)
                if why or [fingerprint(sample) for sample in again.several(LOOKED_AT)] != expected:
                    return why or "after load_state_dict(state_dict()) it gives other samples"
                num_tried += 1
        except Exception as error:
            return f"its state cannot be restored: {type(error).__name__}: {error}"
        return "" if num_tried else "it is too short to try its state"

    def head(self, count: int) -> list[Any]:
        """Return the first samples, for an evaluation: all, if there are fewer."""

        def read() -> list[Any]:
            reader = Reader(self, seed=0)
            reader.open(0)
            return reader.several(count)

        return list(in_child(read))


def length_of(data: Any) -> int | None:
    try:
        return len(data)
    except (TypeError, NotImplementedError):
        return None


def shuffles(thing: Any, depth: int = 0) -> bool:
    """Do Hugging Face data, also in an attribute of a user's class, have a shuffle buffer? Their state lacks it."""
    if isinstance(thing, (list, tuple)):
        return any(shuffles(part, depth) for part in thing)
    if type(thing).__module__.partition(".")[0] != "datasets":
        own = vars(thing).values() if depth < 2 and hasattr(thing, "__dict__") else ()
        return any(shuffles(part, depth + 1) for part in own)
    if "Shuffle" in type(thing).__name__ or getattr(thing, "_shuffling", None) is not None:
        return True
    inner = [getattr(thing, name, None) for name in ("_ex_iterable", "ex_iterable", "ex_iterables")]
    return depth < MOST_DEPTH and any(shuffles(part, depth + 1) for part in inner if part is not None)


def positions_of_files() -> dict[tuple[str, str], str]:
    """Return the position in each regular file that this process has open for reading only."""
    found = {}
    for number in os.listdir("/proc/self/fd"):
        try:
            path = os.readlink(f"/proc/self/fd/{number}")
            with open(f"/proc/self/fdinfo/{number}") as file:
                about = dict(line.split(":", 1) for line in file if ":" in line)
        except OSError:  # closed meanwhile
            continue
        if os.path.isfile(path) and int(about["flags"], 8) & os.O_ACCMODE == os.O_RDONLY:
            found[number, path] = about["pos"]
    return found


def in_child(function: Callable[[], Any]) -> Any:
    """Call a function in a forked process, and return what it returns."""
    context = multiprocessing.get_context("fork")
    here, there = context.Pipe(duplex=False)

    def work() -> None:
        torch.set_num_threads(1)  # the threads of the parent's OpenMP do not exist here: the first loop would hang
        parent = multiprocessing.parent_process()
        die_with_parent(parent.pid if parent else None)
        try:
            with own_draws():
                answer = pickle.dumps((function(), None))
        except Exception as error:
            answer = pickle.dumps((None, portable(error)))
        there.send_bytes(answer)

    child = context.Process(target=work, daemon=True)  # as the process that reads later: it may not start others
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
