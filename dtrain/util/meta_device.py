"""Build modules on the meta device: shapes without values, so nothing is drawn for them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

DRAWS = frozenset({Tensor.normal_, Tensor.uniform_})


class _NoDraws(TorchFunctionMode):
    """Skips first values of meta tensors: torch's Python implementation of random draws imports its compiler, seconds.

    torch.nn.init's functions work in place and return their tensor.
    """

    def __torch_function__(
        self, function: Callable[..., Any], types: Sequence[type], args: Any = (), kwargs: Any = None
    ) -> Any:
        if function in DRAWS or getattr(function, "__module__", "") == "torch.nn.init":
            tensor = args[0] if args else (kwargs or {}).get("tensor")
            if isinstance(tensor, Tensor) and tensor.is_meta:
                return tensor
        return function(*args, **(kwargs or {}))


@contextmanager
def on_meta() -> Iterator[None]:
    with torch.device("meta"), _NoDraws():
        yield
