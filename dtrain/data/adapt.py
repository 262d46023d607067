"""Take data as people have it: torch's data sets, a DataLoader, Hugging Face data sets, arrays, streams.

Each becomes what the loader reads: a length, and a batch of any sample ids. A sample's random draws (augmentation) are
seeded by its number and epoch, so that a resume and every number of ranks see the same data.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any

import torch
from torch import nn

from dtrain.config.build import build, locate
from dtrain.config.files import TARGET
from dtrain.data.arrays import Arrays, is_array
from dtrain.data.check import check_length
from dtrain.data.refuse import MOST_PARTS, refuse_class, refuse_columns, without_length
from dtrain.data.samples import Samples, is_stream, with_tensors
from dtrain.data.seeding import own_draws, seed_draws
from dtrain.data.stream import Stream
from dtrain.errors import bad
from dtrain.runs.source_lines import at_return, is_users
from dtrain.util.format import kind_of

log = logging.getLogger("dtrain")
VALIDATION = ("val", "validation", "valid", "eval", "dev", "test")
KINDS = (
    "a data set with __getitem__ and __len__ or with __iter__, a DataLoader, a Hugging Face data set, arrays or "
    'tensors (inputs, targets), or {"train": …, "val": …} of these'
)


def open_data(section: Any, trust: Iterable[str] = ()) -> Any:
    """Build what `data=` names: an object with dataset(split), which is None for a split that the data lack."""
    target = section[TARGET]
    if target.startswith("dtrain."):
        return build(section, trust)
    function = locate(target, trust)
    if not callable(getattr(function, "dataset", None)):
        split = splits_by(function, section)
        if split is not None:
            name, values = split
            return Source(
                target, {k: partial(built, section, trust, **{name: v}) for k, v in values.items()}, None, function
            )

    make = partial(built, section, trust)
    made = make()
    if callable(getattr(type(made), "dataset", None)):
        return made
    parts = splits_of(target, made, function)
    again = {name: partial(lambda name: splits_of(target, make())[name], name) for name in parts}
    return Source(target, {name: partial(lambda part: part, part) for name, part in parts.items()}, again, function)


def built(section: Any, trust: Iterable[str], **values: Any) -> Any:
    """Build a user's data with the same random draws each time: all ranks, epochs and resumes must split alike."""
    with own_draws():
        seed_draws(0)
        return build(section, trust, **values)


def splits_by(function: Any, section: Any) -> tuple[str, dict[str, Any]] | None:
    """Return the argument that chooses the split: `split`, or `train` as in torchvision; None if there is none."""
    try:
        names = inspect.signature(function).parameters
    except (TypeError, ValueError):
        return None
    if "split" in names and "split" not in section:
        return "split", {"train": "train", "val": "val"}
    if "train" in names and "train" not in section and names["train"].default in (True, inspect.Parameter.empty):
        return "train", {"train": True, "val": False}
    return None


class Source:
    """Data of any kind, by split.

    again: builds a split anew, which a stream needs for each epoch. function: what `data=` names, for messages.
    """

    def __init__(
        self,
        name: str,
        splits: Mapping[str, Callable[[], Any]],
        again: Mapping[str, Callable[[], Any]] | None = None,
        function: Any = None,
    ) -> None:
        self.name, self.splits, self.again, self.function = name, splits, again or splits, function

    def dataset(self, split: str) -> Any:
        with own_draws():
            seed_draws(0)
            data = self.splits[split]() if split in self.splits else None
            if data is None and split != "train":
                has = f"data={self.name} has no validation split, so nothing is evaluated"
                log.info('%s (return {"train": …, "val": …})', has)
                return None
            dataset = adapted(self.name, data, self.again[split], self.function)
        for note in dataset.notes:
            log.info("data=%s: %s", self.name, note)
        return dataset


def splits_of(name: str, data: Any, function: Any = None) -> dict[str, Any]:
    """Return the parts of what a function or class gave: train, and val if there is one. function: see Source."""
    if isinstance(data, Mapping) and {"data", "target"} <= data.keys():  # scikit-learn's Bunch
        return {"train": (data["data"], data["target"])}
    if isinstance(data, Mapping):
        if "train" not in data:
            rule = f"gave a dict with {', '.join(map(str, data)) or 'nothing'}, without train"
            raise at_return(bad("data", name, rule, 'return {"train": …, "val": …}'), function)
        val = next((split for split in VALIDATION if split in data), None)
        if val not in (None, "val"):
            log.info("data=%s: the split %s is used for validation", name, val)
        return {"train": data["train"]} | ({} if val is None else {"val": data[val]})
    if isinstance(data, (tuple, list)):
        sizes = [len(part) if is_array(part) else None for part in data]
        if len(data) == 4 and None not in sizes:
            a, b, c, d = data
            pairs = [((a, c), (b, d)), ((a, b), (c, d))]  # as train_test_split gives them; as two pairs
            fitting = [p for p in pairs if all(len(x) == len(y) for x, y in p)]
            if len(fitting) == 2 or not fitting:
                rule = f"gave four arrays of {sizes} rows, whose pairs are not clear"
                fix = 'return {"train": (inputs, targets), "val": (inputs, targets)}'
                raise at_return(bad("data", name, rule, fix), function)
            return dict(zip(("train", "val"), fitting[0], strict=True))
        if len(data) == 2 and None not in sizes:
            return {"train": tuple(data)}
        of_samples = isinstance(data, tuple) and all(map(are_samples, data))
        if len(data) == 2 and (of_samples or all(is_pair(part) or is_dataset(part) for part in data)):
            return {"train": data[0], "val": data[1]}
        if isinstance(data, tuple):
            refuse_columns(name, data, function)
            kinds = ", ".join(type(part).__name__ for part in data[:MOST_PARTS])
            fix = 'return {"train": …, "val": …}'
            if len(data) > MOST_PARTS:
                kinds, fix = (
                    f"{len(data)} parts ({type(data[0]).__name__}, …)",
                    "return a list, if these are the samples",
                )
            elif None not in sizes and len(set(sizes)) == 1:
                fix = 'return {"train": (a, b, targets)}, if these are inputs and targets'
            raise at_return(bad("data", name, f"gave a tuple of {kinds}", fix), function)
    return {"train": data}


def is_pair(part: Any) -> bool:
    return isinstance(part, (tuple, list)) and len(part) == 2 and all(map(is_array, part))


def are_samples(part: Any) -> bool:
    """Is it a list of dicts or tuples? Two other lists may be inputs and targets."""
    return isinstance(part, list) and bool(part) and isinstance(part[0], (dict, tuple))


def is_dataset(part: Any) -> bool:
    return not isinstance(part, (tuple, list, str)) and (hasattr(part, "__getitem__") or hasattr(part, "__iter__"))


def adapted(name: str, data: Any, again: Callable[[], Any] | None = None, function: Any = None) -> Any:
    """Return one split as a data set of the loader. again, function: see Source."""
    collate = None
    notes: dict[str, None] = {}
    order: Any = None
    if isinstance(data, torch.utils.data.DataLoader):
        collate, order = of_loader(name, data, notes)
        data = data.dataset
    if type(data) is torch.utils.data.TensorDataset and collate is None:
        data = data.tensors
    if is_array(data):
        return Arrays(name, (data,), function)
    if isinstance(data, tuple) and data and all(map(is_array, data)):
        return Arrays(name, data, function)
    if collate is None:  # a collate function may take samples that are lists
        refuse_columns(name, data, function)
    refuse_class(name, data, function)
    if isinstance(data, nn.Module):
        raise bad("data", name, f"is a model ({type(data).__name__}), not data", f"model={name}")
    reader = reader_of(data, collate, function)
    if is_stream(data):
        assert again is not None, "each process builds a stream itself"
        return Stream(name, with_tensors(data, collate), lambda: with_tensors(again(), collate), collate, notes, reader)
    if hasattr(data, "__getitem__") and hasattr(data, "__len__") and not isinstance(data, (str, Mapping)):
        check_length(name, data)
        return Samples(name, data, collate, order, notes, reader)
    if hasattr(type(data), "__getitem__") and not isinstance(data, (str, Mapping)):
        raise without_length(name, type(data))
    gave = "nothing: it has no return" if data is None else kind_of(data)
    raise bad("data", name, f"gave {gave}, but data must be {KINDS}", f"change what {name} returns")


def reader_of(data: Any, collate: Any, function: Any) -> Any:
    """Return the user's function that gives the samples, whose line a message shows."""
    while isinstance(data, (torch.utils.data.Subset, torch.utils.data.DataLoader)):
        data = data.dataset
    methods = [getattr(type(data), name, None) for name in ("__getitem__", "__iter__")]
    return next((one for one in (collate, *methods, function) if is_users(one)), None)


def of_loader(name: str, loader: Any, notes: dict[str, None]) -> tuple[Any, Any]:
    """Return a DataLoader's collate function, and the sampler that decides the order; None: dtrain shuffles."""
    from torch.utils.data import BatchSampler, DistributedSampler, RandomSampler, SequentialSampler

    notes["batch size and processes of the DataLoader are those of dtrain: train.global_batch_size, loader_workers"] = (
        None
    )
    if is_stream(loader.dataset):
        if loader.batch_size is None:
            rule = "its DataLoader has batch_size=None, so its samples are whole batches, which ranks cannot divide"
            raise bad("data", name, rule, "give single samples from the data set, and DataLoader(…, batch_size=8)")
        return loader.collate_fn, None
    sampler = loader.batch_sampler
    if sampler is not None and type(sampler) is not BatchSampler:
        rule = (
            f"has a {type(sampler).__name__}, which decides what is in a batch, but dtrain divides batches over ranks"
        )
        raise bad("data", name, rule, "a DataLoader with sampler= or shuffle=True, and train.global_batch_size")
    order = loader.sampler
    if isinstance(order, DistributedSampler):  # each rank's own list, of a part of the samples
        notes["dtrain divides the samples over the ranks itself: the DistributedSampler is not used"] = None
        return loader.collate_fn, None if order.shuffle else SequentialSampler(loader.dataset)
    if type(order) is RandomSampler and not order.replacement and order._num_samples is None:
        return loader.collate_fn, None
    if type(order) is SequentialSampler:
        notes["the DataLoader does not shuffle, so the samples are read in order"] = None
    return loader.collate_fn, order
