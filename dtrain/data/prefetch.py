"""Batches that are read before they are asked for: in a thread, or in processes that have cores of their own."""

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

from dtrain.contract import STOP_SIGNALS, die_with_parent, place_sockets
from dtrain.data.windows import IGNORED

if TYPE_CHECKING:
    from torch import Tensor

    Batch = tuple[Tensor, Tensor]

PREFETCH = 2  # batches that each process may have ready or in work; 1 where there is an end, as for validation

# The datasets of one process may share a file or a cache, and one is read ahead while evaluation reads another:
# one batch at a time. Nothing is lost, as threads share Python's own lock anyway.
_reading = threading.Lock()


class Dataset(Protocol):
    """What a loader needs: a length and a batch of any sample ids.

    A batch must be a function of its indices alone, or of indices and keys where the dataset has `draws = True`: a
    draw from a global random generator would differ after a resume. It is read in a thread or in forked processes: a
    file whose position matters must be opened where it is read, not before.
    """

    def __len__(self) -> int: ...

    @property
    def batch(self) -> Callable[..., Batch]: ...


class Request(NamedTuple):
    """Which samples a batch has. `keys` has a uint64 for each if the dataset draws, and is None if it does not."""

    indices: np.ndarray
    keys: np.ndarray | None


def read(dataset: Dataset, request: Request) -> Batch:
    indices, keys = request
    inputs, targets = dataset.batch(indices) if keys is None else dataset.batch(indices, keys)
    if getattr(dataset, "masked", False):
        empty = (targets == IGNORED).flatten(1).all(dim=1)
        if empty.any():  # its mean loss would be 0 / 0 wherever it is a micro-batch of its own
            raise ValueError(
                f"data: sample {indices[int(empty.nonzero()[0])]} has no target, all of them are {IGNORED}\n"
                "  fix: leave such samples out of the dataset"
            )
    return inputs, targets


class Thread:
    """Reads one batch ahead while the step computes: all that text needs, as the step leaves Python for most of it."""

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
    """Reads and decodes ahead in forked processes, which share the memory of a dataset that is held in it.

    No position from `end` on is read unless it is asked for. Who begins again before that, as each evaluation does,
    has asked for all that it wants: the next time no more is read than that.

    They live as long as this process and no longer, and take no notice of the signals that ask it to stop. The
    thread that first calls `get` must be one that stays: the kernel ends them when it goes.
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
        self.request, self.stride, self.end = request, stride, end
        self._settings: dict[str, Any] = {"dataset": _Reader(dataset), "num_workers": workers, "pin_memory": pin_memory}
        self._settings["prefetch_factor"] = PREFETCH if end == math.inf else 1
        self._stop = end
        self._loader: Any = None
        self._batches: Iterator[Any] = iter(())
        self._first = self._next = -1
        self._children: set[Any] = set()

    def get(self, position: int) -> Batch:
        if position < self._next and self.end != math.inf:
            self._stop = self._next
        if position >= self._stop:  # more than was asked for the last time, or than there is
            self._stop = self.end if position < self.end else position + self.stride
            self._next = -1
        if position != self._next:
            self._start(position)
        batch = next(self._batches)
        self._next = position + self.stride
        if isinstance(batch, Exception):
            raise batch
        inputs, targets = batch
        return inputs, targets

    def close(self) -> None:
        """End the processes: asked first, as torch does, then one that is still reading is killed."""
        self._batches = iter(())
        self._loader, self._next = None, -1
        for child in self._children:
            child.kill()
            child.join()
        self._children = set()
        atexit.unregister(self.close)

    def __iter__(self) -> Iterator[Request]:
        """What the processes are asked for, in order; we are their sampler."""
        ahead = itertools.count(self._first, self.stride)
        return map(self.request, itertools.takewhile(lambda position: position < self._stop, ahead))

    def _start(self, position: int) -> None:
        """Begin at a position; the processes are forked the first time, and later drop what they had ahead."""
        self._first = position
        # Blocked signals stay blocked in what is forked, from its first instruction on.
        blocked = signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
        others = set(multiprocessing.active_children())
        try:
            if self._loader is None:
                place_sockets()
                self._loader = self._make_loader()
                atexit.register(self.close)  # Python would wait for ever for a child that ignores SIGTERM
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
            generator=Generator(),  # it draws a seed for its processes, and must not take it from the model's draws
        )


class _Reader:
    """The dataset as torch's DataLoader wants it: an item is a batch. An error is an item, too, so that it keeps its
    type and message on the way."""

    def __init__(self, dataset: Dataset) -> None:
        self.dataset = dataset

    def __getitem__(self, request: Request) -> Batch | Exception:
        try:
            # Into shared memory here: a full /dev/shm is an error then. In the queue's own thread, which does it else,
            # torch drops the batch, and whoever waits for it waits for ever.
            inputs, targets = read(self.dataset, request)
            return inputs.share_memory_(), targets.share_memory_()
        except Exception as error:
            error.add_note(f"in a process of the loader:\n{traceback.format_exc()}")
            try:
                pickle.loads(pickle.dumps(error))  # our own object, to see whether it survives the way
                return error
            except Exception:  # one that cannot travel
                return RuntimeError(f"{type(error).__name__}: {error}")


def _as_it_is(batch: Any) -> Any:
    return batch


def _on_start(worker: int) -> None:
    die_with_parent()
