"""Make a batch of samples as people return them: tuples, dicts, arrays, numbers, PIL images."""

from __future__ import annotations

import linecache
import traceback
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import default_collate

from dtrain.data.check import described
from dtrain.data.fields import TARGETS, Fields, no_targets
from dtrain.errors import bad
from dtrain.runs.source_lines import at_return
from dtrain.util.format import kind_of

Batch = tuple[Any, Any]  # each a Tensor or Fields
NOTHING = object()  # in place of text, and of other things that no model takes


def collated(
    samples: list[Any],
    collate: Callable[[list[Any]], Any] | None,
    notes: dict[str, None],
    name: str = "…",
    reader: Any = None,
) -> Batch:
    """Return (inputs, targets) of these samples. What had to be changed is added to the notes.

    name, reader: of the data, for messages: their setting, and the user's function that gives the samples.
    """
    if collate not in (None, default_collate):
        try:
            return as_batch(collate(samples), notes)
        except ValueError as error:  # images, labels = batch
            frame, line = [*traceback.walk_tb(error.__traceback__)][-1]
            code = frame.f_code
            text = linecache.getline(code.co_filename, line).strip()
            unpacks = code is getattr(collate, "__code__", None) and text.endswith(f"= {code.co_varnames[0]}")
            if not unpacks or not isinstance(samples[0], (tuple, list)):
                raise
            text = f"collate_fn gets a list of samples, here {len(samples)}, each of {len(samples[0])} parts: {error}"
            raise bad("data", name, text, "inputs, targets = default_collate(batch), of torch.utils.data") from error
    written: list[str] = []
    if collate is None:
        fields = samples[0] if isinstance(samples[0], Mapping) else {}
        written = [str(key) for key, value in fields.items() if isinstance(value, str)]
        samples = [plain(sample, "", notes) for sample in samples]
    first = samples[0]
    try:
        if isinstance(first, Mapping) and any(set(sample) != set(first) for sample in samples):
            raise KeyError("torch takes the fields of the first sample, and drops what others have")
        batch = default_collate(samples)
    except (RuntimeError, TypeError, ValueError, KeyError) as error:
        rule = difference(samples)
        if not rule:
            raise
        fix = "give all samples the same parts and shapes, or return DataLoader(dataset, collate_fn=…), which pads them"
        raise at_return(bad("data", name, rule, fix), reader) from error
    return as_batch(batch, notes, written)


def difference(samples: list[Any], part: str = "") -> str:
    """Say how samples differ, so that they cannot be stacked; "" if that is not known."""
    first, forms = samples[0], list(dict.fromkeys(map(form, samples)))
    if len(forms) > 1:
        return f"the samples of a batch differ{f' in {part}' if part else ''}: {' and '.join(forms[:3])}"
    if isinstance(first, Mapping):
        inner = {f"{part}.{key}".lstrip("."): [sample[key] for sample in samples] for key in first}
    elif isinstance(first, (tuple, list)):
        inner = {
            f"{part or 'part'}{'.' if part else ' '}{i}": list(values)
            for i, values in enumerate(zip(*samples, strict=True))
        }
    else:
        return ""
    return next(filter(None, (difference(values, name) for name, values in inner.items())), "")


def form(sample: Any) -> str:
    """Return what must be the same in all samples of a batch."""
    if isinstance(sample, Mapping):
        return f"the fields {', '.join(sorted(map(str, sample)))}"
    if isinstance(sample, (tuple, list)):
        return f"{len(sample)} parts"
    if isinstance(sample, (Tensor, np.ndarray)):
        return f"shape {list(sample.shape)}"
    return "a number" if isinstance(sample, (int, float, np.number)) else described(sample)


def plain(node: Any, name: str, notes: dict[str, None]) -> Any:
    """Return a sample that torch can stack: PIL images as tensors, and without the fields that are not numbers."""
    if type(node).__module__.partition(".")[0] == "PIL":
        notes[f"{name or 'an image'} is a PIL image: used as a float32 tensor from 0 to 1, channels first"] = None
        values = np.asarray(node)
        values = values[:, :, None] if values.ndim == 2 else values
        return torch.from_numpy(values.transpose(2, 0, 1).astype(np.float32) / 255)
    if isinstance(node, Mapping):
        for key, value in node.items():
            if isinstance(value, str) or value is None:
                notes[f"{key} is not a number and is left out"] = None
        return {k: plain(v, f"{k}", notes) for k, v in node.items() if not (isinstance(v, str) or v is None)}
    if isinstance(node, tuple):
        return tuple(plain(value, name or f"part {i}", notes) for i, value in enumerate(node))
    if isinstance(node, list) and name and isinstance(node[0] if node else None, (int, float, list)):
        return torch.tensor(node)  # torch would make one tensor of each place in the list
    return [plain(value, name, notes) for value in node] if isinstance(node, list) else node


def as_batch(batch: Any, notes: dict[str, None], text: Sequence[str] = ()) -> Batch:
    """Split a collated batch into inputs and targets: the last of a tuple, or the field `labels` of a dict.

    text: the fields that were left out of it, because they are text.
    """
    if isinstance(batch, Fields):
        return batch, no_targets(len(batch))
    if isinstance(batch, Mapping):
        fields = {
            str(name): value
            for name, item in batch.items()
            if (value := tensors(item, str(name), notes)) is not NOTHING
        }
        target = next((name for name in TARGETS if name in fields), None)
        values = {name: value for name, value in fields.items() if name != target}
        if not values:
            fix = "return e.g. {'inputs': …, 'labels': …} from the data set or collate function"
            rule = f"a batch has no inputs: its fields are {', '.join(map(str, batch)) or 'none'}"
            if text:
                rule += f"; left out, because it is text: {', '.join(text)}"
                made = f"tokenizer(row[{text[0]!r}], truncation=True, padding='max_length', max_length=128)"
                fix = f"tokenize it first: data.map(lambda row: {made}) of a Hugging Face data set"
            raise bad("data", "…", rule, fix)
        inputs: Any = Fields(values, target)
        return inputs, no_targets(len(inputs)) if target is None else targets_of(fields[target])
    if isinstance(batch, Sequence) and not isinstance(batch, str):
        parts = [tensors(item, f"part {i}", notes) for i, item in enumerate(batch)]
        if len(parts) == 1:
            return whole(parts[0]), no_targets(len(whole(parts[0])))
        if parts:
            for i, part in enumerate(parts):
                if part is NOTHING and isinstance(batch[i], (list, tuple)) and batch[i]:
                    rule = f"part {i} of its samples is {kind_of(batch[i][0])} ({batch[i][0]!r:.40}), not numbers"
                    fix = "leave it out, return (inputs, targets); or " if len(parts) > 2 else ""
                    raise bad("data", "…", rule, f"{fix}a number for each text, as NAMES.index(text)")
            first = parts[0] if len(parts) == 2 else tuple(parts[:-1])
            return whole(first), targets_of(parts[-1])
    inputs = tensors(batch, "the batch", notes)
    return whole(inputs), no_targets(len(whole(inputs)))


def whole(part: Any) -> Any:
    """Return a part of a batch as a tensor or as Fields."""
    if part is NOTHING or (not isinstance(part, Tensor) and not part):
        rule, fix = "a part of the batch holds no numbers", "return tensors, arrays or numbers, e.g. (inputs, targets)"
        raise bad("data", "…", rule, fix)
    return part if isinstance(part, Tensor) else Fields(part)


def targets_of(part: Any) -> Any:
    """Return the targets; class numbers as int64, as torch's losses need them."""
    is_small = isinstance(part, Tensor) and part.dtype in (torch.uint8, torch.int8)
    return part.long() if is_small else whole(part)


def tensors(node: Any, name: str, notes: dict[str, None]) -> Any:
    """Return nested tensors of a collated batch, or NOTHING."""
    if isinstance(node, np.ndarray):
        node = torch.from_numpy(node)
    if isinstance(node, (list, tuple)) and node and all(isinstance(i, (int, float, np.number)) for i in node):
        node = torch.tensor(node)
    if isinstance(node, Tensor):
        if node.dim() == 0:
            rule = f"{name} is one number for the whole batch, but a batch is divided over the ranks by its samples"
            raise bad("data", "…", rule, "one value for each sample: a tensor whose first dimension is the batch")
        return standard(node, name, notes)
    if isinstance(node, Mapping):
        return {str(k): v for k, item in node.items() if (v := tensors(item, f"{name}.{k}", notes)) is not NOTHING}
    if isinstance(node, (list, tuple)) and node and not all(isinstance(item, str) for item in node):
        return tuple(tensors(item, f"{name}.{i}", notes) for i, item in enumerate(node))
    notes[f"{name} ({type(node).__name__}) is not a number and is left out"] = None
    return NOTHING


def standard(values: Tensor, name: str = "", notes: dict[str, None] | None = None) -> Tensor:
    """Return float64 as float32, which the weights are, and small whole numbers as int64, except images' bytes."""
    if values.dtype == torch.float64:
        if notes is not None:
            notes["float64 values are used as float32"] = None
        return values.float()
    return values.long() if values.dtype in (torch.int16, torch.int32, torch.uint16, torch.uint32) else values


def counts_targets(targets: Any) -> bool:
    """Return whether samples may differ in their number of targets that are not -100: sequences of class numbers."""
    return isinstance(targets, Tensor) and targets.dim() > 1 and not targets.is_floating_point()
