"""States of hooks and of streams as plain JSON values, small tensors as text, restored to the bit."""

from __future__ import annotations

import base64
import json
import math
from typing import Any

import torch
from torch import Tensor

from dtrain.errors import CheckpointError
from dtrain.util.dtensor import is_dtensor
from dtrain.util.format import kind_of

MOST_BYTES = 2**20  # every save writes the manifest again
MOST_DEPTH = 32
TENSOR, FLOAT = "__tensor__", "__float__"  # the only key of a dict that stands for a tensor, or for nan and inf
DTYPES = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (
        torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.int16, torch.int8,
        torch.uint8, torch.bool,
    )
}  # fmt: skip


def encode(value: Any, where: str = "state", depth: int = 0) -> Any:
    """Return the value as JSON; raise a TypeError that names the part which cannot be restored as it is."""
    if depth > MOST_DEPTH:
        raise TypeError(f"{where} is nested more than {MOST_DEPTH} deep")
    if value is None or type(value) in (bool, int, str):
        return value
    if type(value) is float:
        return value if math.isfinite(value) else {FLOAT: repr(value)}
    if isinstance(value, Tensor):
        return {TENSOR: encode_tensor(value, where)}
    if type(value) is list:
        return [encode(item, f"{where}[{i}]", depth + 1) for i, item in enumerate(value)]
    if type(value) is dict:
        for key in value:
            if type(key) is not str or key in (TENSOR, FLOAT):
                raise TypeError(f"{where} has the key {key!r}; keys must be text, and not {TENSOR} or {FLOAT}")
        return {key: encode(item, f"{where}[{key!r}]", depth + 1) for key, item in value.items()}
    raise TypeError(
        f"{where} is {kind_of(value)}; it may hold numbers, text, True, False, None, lists, dicts and tensors"
    )


def encode_small(value: Any) -> Any:
    """Return the value as JSON; raise a TypeError also if it has more bytes than a checkpoint keeps."""
    found = encode(value)
    if (length := size(found)) > MOST_BYTES:
        raise TypeError(f"it has {length:,} bytes as text, and a checkpoint keeps {MOST_BYTES:,}")
    return found


def encode_tensor(value: Tensor, where: str) -> list[Any]:
    dtype = str(value.dtype).removeprefix("torch.")
    if is_dtensor(value) or dtype not in DTYPES:
        what = "is sharded: use its full_tensor()" if is_dtensor(value) else f"has the dtype {dtype}"
        raise TypeError(f"{where}: the tensor {what}")
    if value.numel() * value.element_size() > MOST_BYTES:
        raise TypeError(f"{where}: the tensor has more than {MOST_BYTES // 2**20} MiB; write it to a file")
    data = value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
    return [dtype, list(value.shape), base64.b64encode(data).decode()]


def decode(value: Any) -> Any:
    """Return what `encode` was given; tensors are on the CPU. The checkpoint may be anyone's: nothing is executed."""
    if isinstance(value, list):
        return [decode(item) for item in value]
    if not isinstance(value, dict):
        return value
    if value.keys() == {FLOAT}:
        return float(value[FLOAT])
    if value.keys() == {TENSOR}:
        try:
            dtype, shape, text = value[TENSOR]
            if not text:  # torch.frombuffer refuses an empty buffer
                return torch.empty(0, dtype=DTYPES[dtype]).reshape(shape)
            flat = torch.frombuffer(bytearray(base64.b64decode(text, validate=True)), dtype=torch.uint8)
            return flat.view(DTYPES[dtype]).reshape(shape)
        except (ValueError, TypeError, KeyError, RuntimeError) as error:
            raise CheckpointError(f"a tensor of a saved state is damaged: {error}") from error
    return {key: decode(item) for key, item in value.items()}


def size(states: Any) -> int:
    return len(json.dumps(states))
