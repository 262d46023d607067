"""Streams as people have them, for tests/data/test_stream.py and runs of it: ranks import this file."""

from __future__ import annotations

import os
import random
import signal
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from tests.data.own_data import by_name

SIZE = 30  # samples of an epoch, not a multiple of the batch


def sample(number: int) -> Any:
    """It also depends on random draws, from all three generators."""
    x = torch.arange(8) * 0.1 + number / SIZE
    return x + random.random() + np.random.rand() + torch.rand(8), number % 3


class Drawing(IterableDataset[Any]):
    """No state: a resume reads again. Its order is drawn when an epoch begins; workers divide it, as torch's do."""

    def __init__(self, size: int = SIZE) -> None:
        self.order = list(range(size))

    def __iter__(self) -> Iterator[Any]:
        random.shuffle(self.order)  # in place: a second epoch of the same object would begin with the first one's
        info = get_worker_info()
        for number in self.order[info.id :: info.num_workers] if info else self.order:
            yield sample(number)


class Stateful(IterableDataset[Any]):
    """Counts the samples that it reads, to show whether a resume reads them again."""

    def __init__(self, wrong_by: int = 0) -> None:
        self.next, self.wrong_by, self.num_read = 0, wrong_by, 0

    def __iter__(self) -> Iterator[Any]:
        while self.next < SIZE:
            self.next += 1
            self.num_read += 1
            yield sample(self.next - 1)

    def state_dict(self) -> dict[str, Any]:
        return {"next": self.next + self.wrong_by}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.next = state["next"]


class Endless:
    """Only __iter__, and no end."""

    def __iter__(self) -> Iterator[Any]:
        number = 0
        while True:
            yield sample(number)
            number += 1


def generator() -> Iterator[Any]:
    yield from map(sample, range(SIZE))


def loader() -> Any:
    train = DataLoader(Drawing(), batch_size=4, num_workers=2, collate_fn=by_name)
    return {"train": train, "val": DataLoader(Drawing(24), batch_size=4, collate_fn=by_name)}


def hugging_face(shuffled: bool = False) -> Any:
    import datasets

    rows = {"x": [[i / 10] * 8 for i in range(SIZE)], "labels": [i % 3 for i in range(SIZE)], "text": ["a"] * SIZE}
    stream = datasets.Dataset.from_dict(rows).to_iterable_dataset(num_shards=3)
    return stream.shuffle(seed=1, buffer_size=8) if shuffled else stream


def empty() -> Any:
    return (x for x in [])


def by_rank() -> Any:
    return (sample(number) for number in range(int(os.environ.get("RANK", "0")), SIZE, 2))


def changing() -> Iterator[Any]:
    """Other samples in a second process, as a stream of news would give."""
    from pathlib import Path

    began = Path(os.environ["STREAM_CHANGES"])
    shift = int(began.exists())
    for number in range(SIZE):
        yield sample(number if number < 8 else number + shift)


def whole_batches() -> Any:
    return DataLoader(Drawing(), batch_size=None)


def broken() -> Iterator[Any]:
    yield 1 // len("")


class Once:
    """Gives an iterator that is used up."""

    items: Any = map(sample, range(SIZE))

    def __iter__(self) -> Iterator[Any]:
        return Once.items  # type: ignore[no-any-return]


def once() -> Once:
    return Once()


class Dies:
    """A hook: rank 1 is killed after this step."""

    def after_step(self, run: Any) -> None:
        if run.rank == 1 and str(run.step) == os.environ.get("DIE"):
            os.kill(os.getpid(), signal.SIGKILL)
