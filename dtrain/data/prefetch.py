"""Prefetch batches: in a thread, or in processes with their own cores."""

from __future__ import annotations

import atexit
import itertools
import math
import multiprocessing
import pickle
import signal
import threading
import traceback
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np

from dtrain.data.check import checked, name_of
from dtrain.data.windows import IGNORED
from dtrain.errors import bad
from dtrain.runs.protocol import STOP_SIGNALS, die_with_parent, place_sockets
from dtrain.util import disk_space

if TYPE_CHECKING:
    from torch import Tensor

    Batch = tuple[Tensor, Tensor]

PREFETCH = 2  # batches that each process may prefetch; 1 if there is an end, as for validation

# Datasets of one process may share a file or a cache, and one is prefetched while evaluation reads another: so one
# batch at a time. Nothing is lost, because threads share the GIL anyway.
_reading = threading.Lock()


class Dataset(Protocol):
    """What a loader needs: a length, and a batch of any sample ids.

    A batch must depend only on its indices, or on indices and keys if the dataset has `draws = True`: a draw from a
    global random generator would differ after a resume. It is read in a thread or in forked processes: a file whose
    position matters must be opened where it is read, not before.
    """

    def __len__(self) -> int: ...

    @property
    def batch(self) -> Callable[..., Batch]: ...


class Request(NamedTuple):
    """The samples of a batch. `keys` has a uint64 for each if the dataset draws, otherwise it is None.

    Of a stream: a cursor from which it can be read.
    """

    indices: np.ndarray
    keys: Any


def read(dataset: Dataset, request: Request) -> Batch:
    indices, keys = request
    batch = dataset.batch(indices) if keys is None else dataset.batch(indices, keys)
    inputs, targets = checked(batch, len(indices), dataset)
    if getattr(dataset, "masked", False):
        empty = (targets == IGNORED).flatten(1).all(dim=1)
        if empty.any():  # its mean loss would be 0 / 0 if it were a micro-batch of its own
            raise ValueError(
                f"data: sample {indices[int(empty.nonzero()[0])]} has no target, all of them are {IGNORED}\n"
                "  fix: leave such samples out of the dataset"
            )
    expected = getattr(dataset, "num_targets", None)
    if expected is not None and not ((targets != IGNORED).flatten(1).sum(dim=1) == expected).all():
        rule = f"says that each sample has num_targets={expected}, but some have another number of targets"
        raise bad("data", name_of(dataset), rule, "leave out num_targets")
    return inputs, targets


class Thread:
    """Prefetch one batch while the step runs: enough for text, because the step mostly releases the GIL."""

    def __init__(
        self, dataset: Dataset, request: Callable[[int], Request], stride: int, end: float, pin_memory: bool
    ) -> None:
        self.dataset, self.request, self.stride, self.end, self.pin_memory = dataset, request, stride, end, pin_memory
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="loader")
        self._ahead: tuple[int, Future[Batch]] | None = None

    def get(self, position: int) -> Batch:
        if self._ahead is not None and self._ahead[0] == position:
            batch = self._ahead[1].result()
        else:
            batch = self._read(position)
        after = position + self.stride
        self._ahead = (after, self._thread.submit(self._read, after)) if after < self.end else None
        return batch

    def close(self) -> None:
        self._thread.shutdown()

    def _read(self, position: int) -> Batch:
        request = self.request(position)
        with _reading:
            inputs, targets = read(self.dataset, request)
        return (inputs.pin_memory(), targets.pin_memory()) if self.pin_memory else (inputs, targets)


class Processes:
    """Prefetch in forked processes, which share the memory of an in-memory dataset.

    No position from `end` on is read unless requested. A caller that restarts before `end`, as each evaluation does,
    has read all that it needs: next time no more than that is prefetched.

    The processes live exactly as long as this one, and ignore the signals that ask it to stop. The thread that first
    calls `get` must stay alive: the kernel kills the processes when it ends.
    """

    def __init__(
        self,
        dataset: Dataset,
        request: Callable[[int], Request],
        stride: int,
        end: float,
        workers: int,
        pin_memory: bool,
    ) -> None:
        check_shared_memory(dataset)
        self.request, self.stride, self.end = request, stride, end
        self._settings: dict[str, Any] = {"dataset": _Reader(dataset), "num_workers": workers, "pin_memory": pin_memory}
        self._settings["prefetch_factor"] = PREFETCH if end == math.inf else 1
        self._stop = end
        self._loader: Any = None
        self._batches: Iterator[Any] = iter(())
        self._first = self._next = -1
        self._children: set[Any] = set()
        self.cursor: Any = None  # of a stream: the place in it after the newest batch

    def get(self, position: int) -> Batch:
        if position < self._next and self.end != math.inf:
            self._stop = self._next
        if position >= self._stop:  # more than was requested last time, or than there is
            self._stop = self.end if position < self.end else position + self.stride
            self._next = -1
        if position != self._next:
            self._start(position)
        try:
            batch = next(self._batches)
        except (EOFError, ConnectionError) as error:  # torch's own report of a killed process may come later
            for child in self._children:
                child.join(timeout=1)
            dead = [child for child in self._children if child.exitcode is not None]
            if not dead:
                raise
            how = f"ended with exit code {dead[0].exitcode} (negative: killed by that signal)"
            raise RuntimeError(f"DataLoader worker (pid {dead[0].pid}) {how}") from error
        self._next = position + self.stride
        if isinstance(batch, Exception):
            raise batch
        inputs, targets, self.cursor = batch
        return inputs, targets

    def close(self) -> None:
        """Stop the processes: ask first, as torch does, then kill those that are still reading."""
        self._batches = iter(())
        self._loader, self._next = None, -1
        for child in self._children:
            child.kill()
            child.join()
        self._children = set()
        atexit.unregister(self.close)

    def __iter__(self) -> Iterator[Request]:
        """The requests for the processes, in order; this object is their sampler."""
        ahead = itertools.count(self._first, self.stride)
        return map(self.request, itertools.takewhile(lambda position: position < self._stop, ahead))

    def _start(self, position: int) -> None:
        """Start at a position; the processes are forked the first time, and later drop what they had prefetched."""
        self._first = position
        # Blocked signals stay blocked in forked processes from their first instruction on.
        blocked = signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
        others = set(multiprocessing.active_children())
        try:
            if self._loader is None:
                place_sockets()
                self._loader = self._make_loader()
                atexit.register(self.close)  # Python would wait forever for a child that ignores SIGTERM
            self._batches = iter(self._loader)
        finally:
            self._children |= set(multiprocessing.active_children()) - others
            signal.pthread_sigmask(signal.SIG_SETMASK, blocked)

    def _make_loader(self) -> Any:
        from torch import Generator
        from torch.utils.data import DataLoader

        return DataLoader(
            **self._settings,
            sampler=self,
            batch_size=None,
            collate_fn=_as_it_is,
            persistent_workers=True,
            worker_init_fn=_on_start,
            multiprocessing_context="fork",
            generator=Generator(),  # its seeds for the processes must not come from the model's generator
        )


def check_shared_memory(dataset: Dataset) -> None:
    """Refuse a full /dev/shm, through which batches come from the processes, before the first step."""
    if disk_space.shortage(disk_space.SHARED_MEMORY, disk_space.LEAST_SHARED):
        rule, _, fix = disk_space.shared_memory(otherwise="").partition(". Fix: ")
        raise bad("data", name_of(dataset), f"is read in processes of its own, and {rule}", fix)


class _Reader:
    """The dataset for torch's DataLoader: an item is a batch. An error is also an item, so that it keeps its type and
    message."""

    def __init__(self, dataset: Dataset) -> None:
        self.dataset = dataset

    def __getitem__(self, request: Request) -> tuple[Any, Any, Any] | Exception:
        try:
            # Move to shared memory here, so that a full /dev/shm raises an error. Otherwise the queue's thread does it:
            # there torch drops the batch, and its reader waits forever.
            inputs, targets = read(self.dataset, request)
            return inputs.share_memory_(), targets.share_memory_(), getattr(self.dataset, "cursor", None)
        except Exception as error:
            return portable(error)


def portable(error: Exception) -> Exception:
    """Return an error that can be sent to another process, with its traceback as a note."""
    note = f"in a data loader process:\n{traceback.format_exc()}"
    error.add_note(note)
    try:
        pickle.loads(pickle.dumps(error))  # our own object, to test whether it can be pickled
        return error
    except Exception:  # it cannot be pickled
        plain = RuntimeError(f"{type(error).__name__}: {error}")
        plain.add_note(note)
        return plain


def _as_it_is(batch: Any) -> Any:
    return batch


def _on_start(worker: int) -> None:
    parent = multiprocessing.parent_process()
    die_with_parent(parent.pid if parent else None)
