"""Reject what looks like data, and is something else: lists in place of tensors, a class, a data set without length."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import Tensor

from dtrain.data.arrays import is_array
from dtrain.errors import bad
from dtrain.runs.source_lines import at_class, at_return

MOST_PARTS = 5  # of a tuple that may be splits, or inputs and targets


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
