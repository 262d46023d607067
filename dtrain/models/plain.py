"""What a plain module lacks, filled in: its loss, and the plans that have an answer for every model."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn


def complete(model: nn.Module, loss: Callable[..., Any] | None) -> None:
    """Give a model what it does not say itself."""
