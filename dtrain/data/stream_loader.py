"""The loader of a stream: one data rank's part of the global batch at a position, with the same interface as Loader."""

from __future__ import annotations

import math
from collections import deque
from typing import TYPE_CHECKING, Any

import numpy as np

from dtrain.data import prefetch
from dtrain.data.collate import Batch, collated
from dtrain.data.prefetch import Request
from dtrain.data.stream import Stream
from dtrain.data.stream_reader import BEFORE, START, Reader

if TYPE_CHECKING:
    from torch import Tensor


class Part:
    """What the reading process of a rank does: it reads whole global batches, and collates its data rank's part.

    `cursor`: the place in the stream after the newest batch. Only this process knows it: it reads ahead of the steps.
    """

    def __init__(self, stream: Stream, seed: int, batch_size: int, rank_batch_size: int, data_rank: int) -> None:
        self.stream, self.name, self.masked = stream, stream.name, stream.masked
        self.reader = Reader(stream, seed)
        self.batch_size, self.mine = batch_size, slice(data_rank * rank_batch_size, (data_rank + 1) * rank_batch_size)
        self.cursor: dict[str, Any] | None = None

    def __len__(self) -> int:
        raise TypeError("a stream has no length")

    def batch(self, indices: np.ndarray, cursor: dict[str, Any]) -> Batch:
        import torch.utils.data._utils.worker as of_torch

        of_torch._worker_info = None  # get_worker_info(): this process reads all samples, as without workers
        self.reader.seek(int(indices[0]) - self.mine.start, cursor)
        samples = []
        for number in range(self.batch_size):
            if number == max(0, self.batch_size - BEFORE):
                self.reader.mark()
            sample = self.reader.next()
            if self.mine.start <= number < self.mine.stop:
                samples.append(sample)
        self.cursor = self.reader.cursor(sample)
        stream = self.stream
        return collated(samples, stream.collate, stream.noted, stream.name, stream.reader)


class StreamLoader:
    """Returns one data rank's part of the global batch at a position (global samples consumed so far).

    Each rank reads the whole stream in a process of its own, so all see the same global batches, whatever their number.
    A checkpoint keeps the cursor of its position, by which a resume finds it.
    """

    def __init__(
        self,
        stream: Stream,
        global_batch_size: int,
        seed: int,
        data_rank: int = 0,
        data_ranks: int = 1,
        pin_memory: bool = False,
    ) -> None:
        assert global_batch_size % data_ranks == 0, "checked by config.mesh.batch_sizes"
        self.dataset, self.global_batch_size = stream, global_batch_size
        self.data_rank, self.rank_batch_size = data_rank, global_batch_size // data_ranks
        self.cursors: deque[dict[str, Any]] = deque(maxlen=2)  # before the newest batch, which may fail, and after it
        part = Part(stream, seed, global_batch_size, self.rank_batch_size, data_rank)
        self._ahead = prefetch.Processes(part, self.request, global_batch_size, math.inf, 1, pin_memory)

    def indices(self, position: int) -> np.ndarray:
        """Return the numbers of this rank's samples of the global batch that starts at `position`."""
        return self.request(position).indices

    def global_indices(self, position: int) -> np.ndarray:
        return np.arange(position, position + self.global_batch_size)

    def request(self, position: int) -> Request:
        first = position + self.data_rank * self.rank_batch_size
        return Request(np.arange(first, first + self.rank_batch_size), self.cursor_at(position) or START)

    def batch(self, position: int) -> tuple[Tensor, Tensor]:
        """Return this rank's (inputs, targets) of the global batch that starts at `position`."""
        batch = self._ahead.get(position)
        self.cursors.append(self._ahead.cursor)
        return batch

    def cursor_at(self, position: int) -> dict[str, Any] | None:
        """Return the newest cursor that is not beyond a position; None: the stream must be read from its beginning."""
        return next((cursor for cursor in reversed(self.cursors) if cursor["samples"] <= position), None)

    def load(self, cursor: dict[str, Any] | None) -> None:
        """Begin at the cursor of a checkpoint; None: it is unknown, so the stream is read from its beginning."""
        self.cursors.clear()
        if cursor is not None:
            self.cursors.append(cursor)

    def sample(self, index: int = 0) -> tuple[Tensor, Tensor]:
        """Return the first sample as a batch of one, to see its shape."""
        return self.dataset.first

    def close(self) -> None:
        self._ahead.close()
