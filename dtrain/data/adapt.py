"""Take data as people have it: torch's data sets, a DataLoader, Hugging Face data sets, arrays, streams.

Each becomes what the loader reads: a length, and a batch of any sample ids. A sample's random draws (augmentation) are
seeded by its number and epoch, so that a resume and every number of ranks see the same data.
"""

from __future__ import annotations

import hashlib
import inspect
import logging
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from dtrain.config.build import build, locate
from dtrain.config.files import TARGET
from dtrain.data.check import check_length
from dtrain.data.collate import Batch, collated, counts_targets, standard, targets_of
from dtrain.data.fields import Fields
from dtrain.data.seeding import own_draws, seed_draws
from dtrain.data.stream import Stream
from dtrain.errors import bad
from dtrain.runs.source_lines import at_class, at_return, is_users
from dtrain.util.format import kind_of

log = logging.getLogger("dtrain")
MOST_PARTS = 5  # of a tuple that may be splits, or inputs and targets
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


def is_array(part: Any) -> bool:
    """Is it an array, a tensor, or a part of a pandas table? A Hugging Face data set has a shape, too."""
    return (hasattr(part, "dtype") or hasattr(part, "iloc")) and len(getattr(part, "shape", ())) > 0


def refuse_columns(name: str, data: Any, function: Any) -> None:
    """Reject lists where inputs and targets are meant: lists of as many numbers, or lists of numbers, as each other."""
    if (
        not isinstance(data, (tuple, list))
        or not 2 <= len(data) <= MOST_PARTS
        or not all(is_array(p) or isinstance(p, list) for p in data)
    ):
        return
    lists = [part for part in data if isinstance(part, list)]
    if not lists or not all(part and not isinstance(part[0], (dict, tuple)) for part in lists):
        return
    sizes = [len(part) for part in data]
    if min(sizes) <= len(data) or (len(set(sizes)) > 1 and not (len(data) == 4 and sizes[:2] == sizes[2:])):
        return
    kinds = ", ".join(type(part).__name__ for part in data)
    text = any(isinstance(part[0], str) for part in lists)
    names = [f"input_{i}" for i in range(1, len(data))] + ["targets"] if len(data) > 2 else ["inputs", "targets"]
    if len(set(sizes)) > 1:  # of train_test_split
        names = ["train_inputs", "val_inputs", "train_targets", "val_targets"]
    ways = ", ".join(as_tensor(n, part) if isinstance(part, list) else n for n, part in zip(names, data, strict=True))
    whole = f'{{"train": ({ways})}}' if len(data) > 2 and len(set(sizes)) == 1 else ways
    rule = f"gave a tuple of {kinds}, and inputs and targets in memory are tensors or arrays{' of numbers' * text}"
    fix = "numbers in place of the text, then torch.tensor(…)" if text else f"return {whole}"
    raise at_return(bad("data", name, rule, fix), function)


def as_tensor(name: str, part: list[Any]) -> str:
    """How to make one tensor of a list."""
    if isinstance(part[0], Tensor):
        return f"torch.stack({name})"
    return f"torch.tensor(np.array({name}))" if hasattr(part[0], "dtype") else f"torch.tensor({name})"


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


def refuse_class(name: str, data: Any, function: Any) -> None:
    """Reject `return Rings` where `return Rings()` is meant; an enumeration's own class could be read."""
    if not isinstance(data, type) or hasattr(type(data), "__iter__") or hasattr(type(data), "__getitem__"):
        return
    try:
        parameters = list(inspect.signature(data).parameters.values())
    except (TypeError, ValueError):  # a builtin
        parameters = []
    needs = [one.name for one in parameters if one.default is one.empty and one.kind is one.POSITIONAL_OR_KEYWORD]
    rule = f"gave the class {data.__name__}, not an object of it"
    made = f"{data.__name__}({', '.join(f'{one}=…' for one in needs)})"
    raise at_return(bad("data", name, rule, f"return {made}, not {data.__name__}"), function)


def without_length(name: str, kind: Any) -> ValueError:
    """Return the error of a data set that the loader can neither index up to its length nor iterate."""
    has_items = kind.__getitem__ is not getattr(torch.utils.data.Dataset, "__getitem__", None)  # which only raises
    rule = f"{kind.__name__} has {'' if has_items else 'no __getitem__ and '}no __len__"
    fix = "add __len__(self), the number of samples" if has_items else "add __getitem__(self, index) and __len__(self)"
    other = "" if hasattr(kind, "__iter__") else " with __iter__(self)"
    return at_class(bad("data", name, rule, f"{fix}; or make it an IterableDataset{other}"), kind)


def reader_of(data: Any, collate: Any, function: Any) -> Any:
    """Return the user's function that gives the samples, whose line a message shows."""
    while isinstance(data, (torch.utils.data.Subset, torch.utils.data.DataLoader)):
        data = data.dataset
    methods = [getattr(type(data), name, None) for name in ("__getitem__", "__iter__")]
    return next((one for one in (collate, *methods, function) if is_users(one)), None)


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


# ---- what the loader reads -----------------------------------------------------------------------------------


class Arrays:
    """Arrays or tensors in memory: inputs, and targets if there are any."""

    notes: tuple[str, ...] = ()

    def __init__(self, name: str, arrays: tuple[Any, ...], reader: Any = None) -> None:
        self.reader = reader
        if len({len(part) for part in arrays}) > 1:
            rule = f"has arrays of {' and '.join(str(len(part)) for part in arrays)} rows"
            raise at_return(bad("data", name, rule, "one row for each sample in all of them"), reader)
        if any(hasattr(part, "tocsr") for part in arrays):
            raise at_return(bad("data", name, "is a sparse matrix", "return its toarray()"), reader)
        self.columns = [str(column) for column in getattr(arrays[0], "columns", ())]
        wanted = [part.to_numpy() if hasattr(part, "to_numpy") else part for part in arrays]
        for part, values in zip(arrays, wanted, strict=True):
            if not isinstance(values, Tensor) and np.asarray(values).dtype.kind not in "biufc":
                raise at_return(without_numbers(name, part, values), reader)
        given = [part if isinstance(part, Tensor) else torch.from_numpy(np.asarray(part)) for part in wanted]
        parts = [standard(part.detach().cpu()) for part in given]
        if any(part.dtype == torch.float64 for part in given):
            self.notes = ("float64 values are used as float32",)
        self.inputs: Any = parts[0] if len(parts) <= 2 else Fields(tuple(parts[:-1]))
        self.targets = targets_of(parts[-1]) if len(parts) > 1 else torch.zeros(len(parts[0]), 0)
        self.masked = counts_targets(self.targets)

    @property
    def fingerprint(self) -> str:
        """Identify the arrays: shapes, dtypes and 256 rows."""
        digest = hashlib.sha256()
        rows = torch.from_numpy(np.linspace(0, len(self) - 1, min(256, len(self))).astype(np.int64))
        for part in (*self.parts(), self.targets):
            digest.update(f"{part.shape} {part.dtype}".encode())
            digest.update(part[rows].contiguous().view(torch.uint8).numpy().tobytes() if part.numel() else b"")
        return digest.hexdigest()[:16]

    def parts(self) -> list[Tensor]:
        return [t for _, t in self.inputs.leaves()] if isinstance(self.inputs, Fields) else [self.inputs]

    def __len__(self) -> int:
        return len(self.targets)

    def batch(self, indices: np.ndarray) -> Batch:
        rows: Any = torch.from_numpy(np.asarray(indices))
        return self.inputs[rows], self.targets[rows]


def without_numbers(name: str, part: Any, values: Any) -> ValueError:
    """Return the error of an array or a table with text, dates or mixed dtypes."""
    text = (
        [str(c) for c, d in getattr(part, "dtypes", {}).items() if d.kind not in "biuf"]
        if hasattr(part, "columns")
        else []
    )
    if text:
        rule = f"column{'s' * (len(text) > 1)} {', '.join(text)} of its table: no numbers"
        return bad("data", name, rule, f"numbers in place of text and dates, or df.drop(columns={text})")
    rule = f"has an array of {np.asarray(values).dtype}, not of numbers"
    shapes = {getattr(value, "shape", None) for value in values} if isinstance(values, np.ndarray) else {None}
    if None not in shapes:  # an array in each place
        fix = (
            "one array: np.stack(list(…)).astype('float32')" if len(shapes) == 1 else "arrays of one shape: pad or crop"
        )
        return bad("data", name, f"{rule}: each of its elements is an array", fix)
    return bad("data", name, rule, 'numbers: tensors or arrays, if need be with .astype("float32")')


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
