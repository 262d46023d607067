"""A map-style data set of any library as a data set of the loader; also the first samples of a stream."""

from __future__ import annotations

import logging
from typing import Any

import numpy as np
import torch

from dtrain.data.collate import Batch, collated, counts_targets
from dtrain.data.seeding import own_draws, seed_draws
from dtrain.data.stream import Stream
from dtrain.errors import bad
from dtrain.runs.source_lines import at_return

log = logging.getLogger("dtrain")


def is_stream(data: Any) -> bool:
    """Can it only be iterated?"""
    only_iterates = hasattr(data, "__iter__") and not hasattr(data, "__getitem__")
    return only_iterates or isinstance(data, torch.utils.data.IterableDataset)


def with_tensors(data: Any, collate: Any) -> Any:
    """Return what a DataLoader reads, and Hugging Face data without a format of their own as tensors."""
    data = data.dataset if isinstance(data, torch.utils.data.DataLoader) else data
    if type(data).__module__.startswith("datasets.") and collate is None:
        own = data._formatting if is_stream(data) else data.format["type"]
        return data if own else data.with_format("torch")
    return data


def in_memory(stream: Stream, count: int) -> Samples:
    """Return the first samples of a stream, as a data set for evaluations."""
    samples = Samples(stream.name, stream.head(count), stream.collate, None, {}, stream.reader)
    log.info("data=%s: evaluations read the first %d samples of the validation stream", stream.name, len(samples))
    samples.kept = stream.fingerprint
    return samples


class Samples:
    """A map-style data set. It is read in a process of its own, because a sample may draw random numbers."""

    draws = True
    own_process = True
    kept = ""  # the fingerprint of a stream whose samples they are

    def __init__(
        self, name: str, data: Any, collate: Any, order: Any, notes: dict[str, None], reader: Any = None
    ) -> None:
        self.reader = reader
        self.name, self.data, self.collate, self.sampler, self.noted = name, data, collate, order, notes
        self.data = with_tensors(data, collate)
        # all rows at once, if no function of the user runs for each
        self.at_once = type(data).__module__.startswith("datasets.") and data.format["type"] != "custom"
        self.is_masked = getattr(data, "masked", None)
        if len(self) and self.is_masked is None:
            self.is_masked = counts_targets(self.batch(np.array([0]), np.zeros(1, np.uint64))[1])

    @property
    def notes(self) -> list[str]:
        return list(self.noted)

    @property
    def masked(self) -> bool:
        return bool(self.is_masked)

    @property
    def fingerprint(self) -> str:
        return self.kept or str(getattr(self.data, "fingerprint", ""))

    def __len__(self) -> int:
        return len(self.data) if self.sampler is None else len(self.sampler)

    def order(self, seed: int, epoch: int) -> np.ndarray | None:
        """Return the order in which a sampler of the user reads an epoch; None: the loader shuffles."""
        if self.sampler is None:
            return None
        with own_draws():
            seed_draws(key := int(np.random.SeedSequence([seed, epoch]).generate_state(1, np.uint64)[0]))
            if getattr(self.sampler, "generator", None) is not None:
                self.sampler.generator.manual_seed(key % 2**63)
            if callable(getattr(self.sampler, "set_epoch", None)):
                self.sampler.set_epoch(epoch)
            return np.fromiter(self.sampler, np.int64)

    def batch(self, indices: np.ndarray, keys: np.ndarray) -> Batch:
        with own_draws():
            seed_draws(int(keys[0]) if len(keys) else 0)
            if self.at_once:
                samples = self.data.__getitems__([int(i) for i in indices])
            else:
                samples = []
                for index, key in zip(indices, keys, strict=True):
                    seed_draws(int(key))
                    samples.append(self._sample(int(index)))
            if self.collate is None:
                self._refuse_none(samples, indices)
            return collated(samples, self.collate, self.noted, self.name, self.reader)

    def _sample(self, index: int) -> Any:
        try:
            return self.data[index]
        except IndexError as error:  # often __len__ is too large
            text = f"{error}: {type(self.data).__name__}.__getitem__({index}), and its __len__ is {len(self.data)}"
            raise IndexError(text).with_traceback(error.__traceback__) from error

    def _refuse_none(self, samples: list[Any], indices: np.ndarray) -> None:
        for index, sample in zip(indices, samples, strict=True):
            if sample is None:
                rule = f"{type(self.data).__name__}.__getitem__({index}) returned None"
                fix = "return a sample for each index, e.g. (inputs, targets)"
                raise at_return(bad("data", self.name, rule, fix), self.reader)
