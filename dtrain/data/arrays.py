"""Arrays or tensors in memory as a data set of the loader."""

from __future__ import annotations

import hashlib
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dtrain.data.collate import Batch, counts_targets, standard, targets_of
from dtrain.data.fields import Fields
from dtrain.errors import bad
from dtrain.runs.source_lines import at_return


def is_array(part: Any) -> bool:
    """Is it an array, a tensor, or a part of a pandas table? A Hugging Face data set has a shape, too."""
    return (hasattr(part, "dtype") or hasattr(part, "iloc")) and len(getattr(part, "shape", ())) > 0


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
    array = np.asarray(values)
    rule = f"has an array of {array.dtype}, not of numbers"
    if found := next((str(one) for one in array.flat if isinstance(one, str)), None):
        classes = "np.unique(y, return_inverse=True)[1] numbers the classes of an array y of text"
        fix = (
            classes if array.ndim == 1 else "leave out the columns of text, or number their values: pd.get_dummies(df)"
        )
        return bad("data", name, f"{rule}: it has the text {found!r:.40}", fix)
    if array.ndim == 1 and len(array) and all(isinstance(one, np.ndarray) for one in array):  # an array in each place
        alike = len({one.shape for one in array}) == 1
        fix = "one array: np.stack(list(…)).astype('float32')" if alike else "arrays of one shape: pad or crop"
        return bad("data", name, f"{rule}: each of its elements is an array", fix)
    return bad("data", name, rule, 'numbers: tensors or arrays, if need be with .astype("float32")')
