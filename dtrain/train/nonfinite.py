"""After a loss that is not finite: is it the data? Only then read again, so that a good step costs nothing."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from dtrain.data import prefetch
from dtrain.data.loader import Loader
from dtrain.data.stream_loader import StreamLoader
from dtrain.train.process import log

TRAINING = "a smaller optim.lr, a longer schedule.warmup_steps, precision=bf16, or train.nonfinite=skip"


def advice(data: Loader | StreamLoader, begin: int) -> str:
    """What to do about the step that read the global batch at `begin`."""
    try:
        found = first_sample(data, begin)
    except Exception:  # the data are not the question then
        log.exception("the batch could not be read again")
        found = ""
    return f". {found}. Fix: repair it, or leave it out of the data" if found else f". Fix: {TRAINING}"


def first_sample(data: Loader | StreamLoader, begin: int) -> str:
    """Name the first sample of a global batch whose inputs or targets are not finite; "" if all are."""
    if not isinstance(data, Loader):  # a stream is not read again for this
        return ""
    count = data.rank_batch_size
    for start in range(begin, begin + data.global_batch_size, count):
        request = data._samples(start, count)
        inputs, targets = prefetch.read(data.dataset, request)
        for part, what in ((inputs, "inputs"), (targets, "targets")):
            for tensor in tensors(part):
                if tensor.is_floating_point() and len(tensor) == count:
                    broken = (~torch.isfinite(tensor)).reshape(count, -1).any(dim=1).nonzero()
                    if len(broken):
                        return (
                            f"Sample {request.indices[int(broken[0])]} of the train split has NaN or Inf in its {what}"
                        )
    return ""


def tensors(part: Any) -> Iterator[Tensor]:
    yield from [part] if isinstance(part, Tensor) else [tensor for _, tensor in part.leaves()]
