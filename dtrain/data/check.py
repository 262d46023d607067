"""Check what a data set of the user gives, with a message in its own terms: a length, and batches of tensors."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dtrain.config.files import TARGET
from dtrain.errors import bad
from dtrain.runs.source_lines import at_class, at_return, is_users
from dtrain.util.format import kind_of

NEEDED = "an object with __len__ and batch(indices) -> (inputs, targets)"
METHODS = {"__len__": "def __len__(self)", "batch": "def batch(self, indices)"}


def dataset_of(data: Any, split: str, section: Mapping[str, Any] | None = None) -> Any:
    """Return data.dataset(split), if it is something that a loader can read. section: its settings, for messages."""
    dataset = data.dataset(split)
    if dataset is None:
        if split == "train":
            rule = f'dataset("{split}") returned None: is a `return` missing?'
            raise at_return(bad("data", name_of(data), rule, f"return {NEEDED}"), type(data).dataset)
        return None
    name = name_of(dataset)
    if getattr(dataset, "is_stream", False):  # data/stream.py has looked at its first samples
        return dataset
    missing = [m for m in METHODS if not callable(getattr(type(dataset), m, getattr(dataset, m, None)))]
    if missing:
        rule = f'dataset("{split}") returned a {name}, which has no {" and no ".join(missing)}'
        fix = f"return {NEEDED}"
        if is_users(type(dataset)):
            fix = f"add {' and '.join(f'`{METHODS[m]}`' for m in missing)} to {name}"
        raise at_class(bad("data", name_of(data), rule, f"{fix} (docs/your-own.md)"), type(dataset))
    check_length(name_of(data), dataset)
    if len(dataset) == 0:
        rule = f'the "{split}" split has no samples'
        fix = "train.eval_batches=0, or " if split == "val" else ""
        settings = {f"data.{k}": v for k, v in (section or {}).items() if k != TARGET and v is not None}
        zeros = [
            key for key, value in settings.items() if value == 0 and not isinstance(value, bool) and "seed" not in key
        ]
        if zeros:  # a likely cause
            rule += f", with {' '.join(f'{key}={settings[key]}' for key in zeros)}"
            error = bad("data", name_of(data), rule, f"{fix}leave out {' '.join(zeros)}, or give a larger number")
        else:
            typed = ", ".join(f"{key}={value}" for key, value in settings.items())
            reads = "what it reads: a path, a filter, or the size of a split"
            error = bad("data", name_of(data), rule, f"{fix}check {typed or reads}")
        raise at_return(error, length_of(dataset))
    return dataset


def check_length(name: str, data: Any) -> None:
    """Reject a __len__ that gives no number: Python's own error has no line of the user."""
    try:
        len(data)
    except (TypeError, ValueError) as error:
        method = getattr(type(data), "__len__", None)
        if not is_users(method) or (error.__traceback__ and error.__traceback__.tb_next):  # or one in it
            raise
        rule = f"{type(data).__name__}.__len__ returned no number of samples ({error})"
        raise at_return(bad("data", name, rule, "return len(…) of what holds the samples"), method) from error


def class_names(data: Any, number: int) -> list[str]:
    """Return the names of the data's classes, in order; [] if they are not known."""
    for key in ("labels", "classes"):
        found = getattr(data, key, None)
        if not isinstance(found, (list, tuple)) or len(found) != number:
            continue
        if all(isinstance(name, (str, int)) for name in found):
            return [str(name) for name in found]
    return []


def name_of(thing: Any) -> str:
    return str(getattr(thing, "name", "") or type(thing).__name__)


def checked(batch: Any, count: int, dataset: Any) -> tuple[Any, Any]:
    """Return the batch as (inputs, targets) with `count` samples each; raise if it is anything else."""
    from torch import Tensor  # not at import: see prefetch.py

    where, missing = f"{type(dataset).__name__}.batch", " (is a `return` missing?)" * (batch is None)
    if not isinstance(batch, (tuple, list)) or len(batch) != 2:
        rule = f"{where} returned {described(batch)}{missing}, not a pair (inputs, targets)"
        raise refused(dataset, rule, "return inputs, targets")
    parts = dict(zip(("inputs", "targets"), batch, strict=True))
    wrong = {w: part for w, part in parts.items() if not isinstance(part, Tensor) and not hasattr(part, "leaves")}
    if wrong:
        arrays = all(type(part).__module__ == "numpy" for part in wrong.values())
        how = "torch.from_numpy(…)" if arrays else "torch.tensor(…) or torch.stack(…)"
        what = " and ".join(f"{what} as {described(part)}" for what, part in wrong.items())
        raise refused(dataset, f"{where} returned {what}", f"{'tensors' if len(wrong) > 1 else 'a tensor'}: {how}")
    asked = f"{where} was asked for {count} sample{'s' * (count != 1)}, and returned"
    for what, part in parts.items():
        if isinstance(part, Tensor) and not part.dim():
            rule = f"{asked} {what} of shape [], not [{count}]"
        elif len(part) != count:
            rule = f"{asked} {len(part)} {what}{all_of(dataset, len(part))}"
        else:
            continue
        raise refused(dataset, rule, "return one row for each index, in their order")
    inputs, targets = batch
    return inputs, targets


def without_targets(dataset: Any, inputs: Any, who: str) -> ValueError:
    """Return the error of samples that are inputs alone. who: needs their targets."""
    from dtrain.data.fields import TARGETS  # not at import: it imports torch

    columns, fields = getattr(dataset, "columns", ()), getattr(inputs, "values", ())
    rule, fix = "returns no targets", "return (inputs, targets)"
    if columns:
        rule = f"returns a table of columns {', '.join(columns)}, all of them inputs, and no targets"
        found = next((c for c in columns if c.lower() in (*TARGETS, "class")), columns[-1])
        fix = f'return df.drop(columns="{found}"), df["{found}"]'
    elif isinstance(fields, dict) and fields:
        rule = f"has no targets among its fields {', '.join(map(str, fields))}"
        fix = 'name the field with the targets "labels", or return (inputs, targets)'
    return at_return(bad("data", name_of(dataset), f"{rule}, which {who} needs", fix), reader_of(dataset))


def described(value: Any) -> str:
    if isinstance(value, (tuple, list)):
        return f"{kind_of(value)} of {len(value)}" + (f" ({type(value[0]).__name__})" if len(value) else "")
    return "None" if value is None else kind_of(value)


def refused(dataset: Any, rule: str, fix: str) -> ValueError:
    return at_return(bad("data", name_of(dataset), rule, fix), reader_of(dataset))


def reader_of(dataset: Any) -> Any:
    """Return the user's function or class that gives the samples (data/adapt.py), or the data set's own `batch`."""
    return getattr(dataset, "reader", None) or getattr(type(dataset), "batch", None)


def length_of(dataset: Any) -> Any:
    """Return the user's method that counts the samples, or else what gives them."""
    method = getattr(type(getattr(dataset, "data", dataset)), "__len__", None)
    return method if is_users(method) else reader_of(dataset)


def all_of(dataset: Any, count: int) -> str:
    has_length = hasattr(type(dataset), "__len__") and not getattr(dataset, "is_stream", False)
    return ", all of them: the indices are not used" if has_length and count == len(dataset) else ""
