"""Streams as people have them, for tests/data/test_stream.py and runs of it: ranks import this file."""

from __future__ import annotations

import os
import random
import signal
from collections.abc import Iterator
from pathlib import Path
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


def lines() -> Path:
    return Path(os.environ["STREAM_FILE"])


def write_lines(path: Path) -> None:
    path.write_text("".join(f"{number}\n" for number in range(SIZE)))


class OpenFile:
    """Opens its file when it is built, as many do."""

    def __init__(self, path: str = "") -> None:
        self.file = open(path or lines())  # noqa: SIM115

    def __iter__(self) -> Iterator[Any]:
        return (sample(int(line)) for line in self.file)


def of_open_file() -> Any:
    return (sample(int(line)) for line in open(lines()))


def of_global_file() -> Any:
    global opened
    opened = opened or OpenFile()
    return opened


opened: Any = None
of_module = (sample(number) for number in range(SIZE))


def one_generator() -> Any:
    return of_module


class Shards:
    """A generator that shuffles its shards when it begins, and keeps no more than the shard and the place in it."""

    def __init__(self, shards: int = 3) -> None:
        self.state, self.shards = {"shard": 0, "offset": 0}, shards

    def __iter__(self) -> Iterator[Any]:
        shards = list(range(self.shards))
        random.shuffle(shards)
        for index in range(self.state["shard"], len(shards)):
            for number in range(self.state["offset"], SIZE // self.shards):
                self.state = {"shard": index, "offset": number + 1}
                yield sample(shards[index] * SIZE // self.shards + number)
            self.state = {"shard": index + 1, "offset": 0}

    def state_dict(self) -> dict[str, Any]:
        return dict(self.state)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.state = dict(state)


class ByItself(Shards):
    """Each object has another order of the shards, which the state does not keep."""

    built = 0

    def __init__(self) -> None:
        super().__init__()
        ByItself.built += 1

    def __iter__(self) -> Iterator[Any]:
        for x, target in super().__iter__():
            yield x + ByItself.built, target


class Growing(Stateful):
    """After the first samples its state is larger than a checkpoint keeps."""

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "seen": list(range(200_000 if self.next > 16 else 1))}


class Changed(Stateful):
    """Its state has stopped to fit after the trial."""

    def state_dict(self) -> dict[str, Any]:
        return {"next": self.next + (self.next > 16)}


class WithSplit(IterableDataset[Any]):
    """Its constructor draws, and has an argument for the split."""

    def __init__(self, split: str) -> None:
        self.order = random.sample(range(SIZE), SIZE)

    def __iter__(self) -> Iterator[Any]:
        yield from map(sample, self.order)


class WithLength(IterableDataset[Any]):
    def __len__(self) -> int:
        return SIZE + 1

    def __iter__(self) -> Iterator[Any]:
        yield from map(sample, range(SIZE))


class WithProcesses:
    def __iter__(self) -> Iterator[Any]:
        return iter(DataLoader(list(map(sample, range(8))), num_workers=1, batch_size=None))


class WithThreads:
    """Its __init__ and its samples use torch's threads."""

    def __iter__(self) -> Iterator[Any]:
        for number in range(SIZE):
            yield (torch.ones(400, 400) @ torch.ones(400, 8))[0] + number, number % 3


def large_shuffle() -> Any:
    """More samples than the default buffer of 1000."""
    import datasets

    rows = {"x": list(range(3000)), "labels": [0] * 3000}
    return datasets.Dataset.from_dict(rows).to_iterable_dataset(num_shards=4).shuffle(seed=2)


class Wrapped:
    """Hugging Face data in a class of the user's own, which hands their state on."""

    def __init__(self) -> None:
        self.data = large_shuffle().with_format("torch")

    def __iter__(self) -> Iterator[Any]:
        return iter(self.data)

    def state_dict(self) -> Any:
        return self.data.state_dict()

    def load_state_dict(self, state: Any) -> None:
        self.data.load_state_dict(state)


def empty() -> Any:
    return (x for x in [])


def by_rank() -> Any:
    return (sample(number) for number in range(int(os.environ.get("RANK", "0")), SIZE, 2))


def changing() -> Iterator[Any]:
    """Other samples in a second process, as a stream of news would give."""
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
