"""Which samples a rank sees at a position: a pure function of (seed, epoch), so resuming needs one number."""

from __future__ import annotations

import math
from functools import lru_cache
from typing import TYPE_CHECKING

import numpy as np

from dtrain.data import prefetch
from dtrain.data.counter_rng import sample_keys
from dtrain.data.prefetch import Dataset, Request

if TYPE_CHECKING:
    from torch import Tensor


def permutation(seed: int, epoch: int, size: int) -> np.ndarray:
    """Return the sample order of one epoch.

    It sorts raw Philox bits instead of calling Generator.permutation: numpy guarantees the bits across releases but not
    the methods (NEP 19), and a numpy upgrade must not reorder a resumed run.
    """
    bits = np.random.Philox(np.random.SeedSequence([seed, epoch])).random_raw(size)
    # The id is in the low bits of its own key, so keys are unique and every sort gives the same order. Sorting in place
    # is several times faster than argsort (10 million samples: 0.3 s instead of 2.1 s).
    id_bits = np.uint64(size.bit_length())
    bits <<= id_bits  # in place, like all of this: 20 million samples take 153 MiB each time
    bits |= np.arange(size, dtype=np.uint64)
    bits.sort()
    bits &= (np.uint64(1) << id_bits) - np.uint64(1)
    return bits.view(np.int64)


class Loader:
    """Returns one data rank's part of the global batch at a position (global samples consumed so far)."""

    def __init__(
        self,
        dataset: Dataset,
        global_batch_size: int,
        seed: int,
        data_rank: int = 0,
        data_ranks: int = 1,
        shuffle: bool = True,
        pin_memory: bool = False,
        workers: int = 0,
    ) -> None:
        if global_batch_size < 1 or global_batch_size % data_ranks:
            nearest = max(1, round(global_batch_size / data_ranks)) * data_ranks
            raise ValueError(
                f"train.global_batch_size={global_batch_size} must be a positive multiple of "
                f"the {data_ranks} data-parallel ranks\n  fix: try {nearest}"
            )
        if seed < 0:
            raise ValueError(f"train.seed={seed} must not be negative\n  fix: try {-seed}")
        assert 0 <= data_rank < data_ranks, (data_rank, data_ranks)
        assert len(dataset) > 0, "an empty dataset should have been refused where it was built"
        self.dataset = dataset
        self.global_batch_size = global_batch_size
        self.seed = seed
        self.data_rank = data_rank
        self.rank_batch_size = global_batch_size // data_ranks
        self.shuffle = shuffle
        size = len(dataset)
        # Two, because a batch may span two epochs. This cache and the prefetched batches are the only state. The cache
        # grows with the data: 4 bytes per sample and epoch on each rank, so 76 MiB for 20 million, and twice that from
        # the second epoch on.
        dtype = np.uint32 if size <= 1 << 32 else np.int64

        def order(epoch: int) -> np.ndarray:
            own = dataset.order(seed, epoch) if hasattr(dataset, "order") else None
            ours = permutation(seed, epoch, size) if shuffle else np.arange(size)
            return (ours if own is None else own).astype(dtype)

        self._order = lru_cache(maxsize=2)(order)
        workers = workers or int(getattr(dataset, "own_process", False))
        # Validation reads whole batches of its split, then restarts; training never ends.
        end = math.inf if shuffle else size // global_batch_size * global_batch_size
        ahead_of = (dataset, self.request, global_batch_size, end)
        self._ahead: prefetch.Thread | prefetch.Processes = (
            prefetch.Processes(*ahead_of, workers, pin_memory) if workers else prefetch.Thread(*ahead_of, pin_memory)
        )

    def indices(self, position: int) -> np.ndarray:
        """Return this rank's sample ids of the global batch that starts at `position`."""
        return self.request(position).indices

    def global_indices(self, position: int) -> np.ndarray:
        """Return all ranks' sample ids of the global batch that starts at `position`."""
        return self._samples(position, self.global_batch_size).indices

    def request(self, position: int) -> Request:
        """Return this rank's sample ids at `position`, and their random keys if the dataset draws."""
        assert position >= 0, position
        return self._samples(position + self.data_rank * self.rank_batch_size, self.rank_batch_size)

    def _samples(self, start: int, count: int) -> Request:
        epochs, offsets = np.divmod(np.arange(start, start + count), len(self.dataset))
        if not self.shuffle:  # validation: the same samples with the same draws every time
            return self._request(self._order(0)[offsets].astype(np.int64), 0 * epochs)
        order = [self._order(epoch)[offsets[epochs == epoch]] for epoch in range(epochs[0], epochs[-1] + 1)]
        return self._request(np.concatenate(order).astype(np.int64), epochs)

    def _request(self, indices: np.ndarray, epochs: np.ndarray) -> Request:
        if not getattr(self.dataset, "draws", False):
            return Request(indices, None)
        keys = [sample_keys(self.seed, epoch, indices[epochs == epoch]) for epoch in range(epochs[0], epochs[-1] + 1)]
        return Request(indices, np.concatenate(keys))

    def batch(self, position: int) -> tuple[Tensor, Tensor]:
        """Return this rank's (inputs, targets) of the global batch that starts at `position`.

        The next batches are prefetched meanwhile: a step does not wait for a disk that keeps up with it.
        """
        return self._ahead.get(position)

    def sample(self, index: int = 0) -> tuple[Tensor, Tensor]:
        """Return one sample as a batch of one, to see its shape; nothing is prefetched."""
        return prefetch.read(self.dataset, self._request(np.array([index]), np.array([0])))

    def cursor_at(self, position: int) -> None:
        """A resume needs the position only; that of a stream needs more (stream_loader.py)."""

    def close(self) -> None:
        """Stop the prefetching thread or processes; they end with this process anyway."""
        self._ahead.close()
