"""Check what a data set of the user gives, with a message in its own terms: a length, and batches of tensors."""

from __future__ import annotations

from typing import Any

from dtrain.errors import bad

NEEDED = "an object with __len__ and batch(indices) -> (inputs, targets)"


def dataset_of(data: Any, split: str) -> Any:
    """Return data.dataset(split), if it is something that a loader can read."""
    dataset = data.dataset(split)
    if dataset is None:
        if split == "train":
            raise bad("data", name_of(data), f'dataset("{split}") returned None', f"return {NEEDED}")
        return None
    name = name_of(dataset)
    if getattr(dataset, "is_stream", False):  # data/stream.py has looked at its first samples
        return dataset
    missing = [m for m in ("__len__", "batch") if not callable(getattr(type(dataset), m, getattr(dataset, m, None)))]
    if missing:
        rule = f'dataset("{split}") returned a {name}, which has no {" and no ".join(missing)}'
        raise bad("data", name_of(data), rule, f"return {NEEDED} (docs/your-own.md)")
    if len(dataset) == 0:
        rule = f'the "{split}" split has no samples'
        fix = "train.eval_batches=0, or " if split == "val" else ""
        raise bad("data", name_of(data), rule, f"{fix}check the path and the filters of {name}: len() is 0")
    return dataset


def name_of(thing: Any) -> str:
    return str(getattr(thing, "name", "") or type(thing).__name__)


def checked(batch: Any, count: int, dataset: Any) -> tuple[Any, Any]:
    """Return the batch as (inputs, targets) with `count` samples each; raise if it is anything else."""
    from torch import Tensor  # not at import: see prefetch.py

    where = f"{type(dataset).__name__}.batch"
    if not isinstance(batch, (tuple, list)) or len(batch) != 2:
        rule = f"{where} returned {described(batch)}, not a pair (inputs, targets)"
        raise bad("data", name_of(dataset), rule, "return inputs, targets")
    for part, what in zip(batch, ("inputs", "targets"), strict=True):
        if not isinstance(part, Tensor) and not hasattr(part, "leaves"):
            how = "torch.from_numpy(…)" if type(part).__module__ == "numpy" else "torch.tensor(…) or torch.stack(…)"
            raise bad("data", name_of(dataset), f"{where} returned {what} as {described(part)}", f"a tensor: {how}")
        size = len(part) if not isinstance(part, Tensor) or part.dim() else 0
        if size != count:
            rule = f"{where} was asked for {count} sample{'s' * (count != 1)}, and returned {size} {what}"
            raise bad("data", name_of(dataset), rule, "return one row for each index, in their order")
    inputs, targets = batch
    return inputs, targets


def described(value: Any) -> str:
    if isinstance(value, (tuple, list)):
        return f"a {type(value).__name__} of {len(value)}" + (f" ({type(value[0]).__name__})" if len(value) else "")
    return "None" if value is None else f"a {type(value).__name__}"
