"""A batch of several tensors, for models that are called as model(**batch), model(batch) or model(a, b)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

TARGETS = ("labels", "label", "targets", "target", "y")  # the name of the targets in a dict, or in a forward()


class Fields:
    """Tensors by name (or by place) that share their first dimension, with the few methods of a tensor that the loop
    and the strategies call. `target` is the name that the targets had beside them."""

    def __init__(self, values: dict[str, Any] | tuple[Any, ...], target: str | None = None) -> None:
        self.values, self.target = values, target

    def leaves(self) -> Iterator[tuple[str, Tensor]]:
        return _leaves(self.values, "")

    def map(self, change: Callable[[Tensor], Tensor]) -> Fields:
        return Fields(_map(self.values, change), self.target)

    def __len__(self) -> int:
        return len(next(self.leaves())[1])

    def __getitem__(self, part: slice) -> Fields:
        return self.map(lambda tensor: tensor[part])

    def split(self, size: int) -> tuple[Fields, ...]:
        return tuple(self[start : start + size] for start in range(0, len(self), size))

    def tensor_split(self, parts: int) -> tuple[Fields, ...]:
        """Like torch's: the first parts take what is left over."""
        size, more = divmod(len(self), parts)
        ends = [size * (i + 1) + min(i + 1, more) for i in range(parts)]
        return tuple(self[start:end] for start, end in zip([0, *ends], ends, strict=False))

    def to(self, *to: Any, **options: Any) -> Fields:
        return self.map(lambda tensor: tensor.to(*to, **options))

    def pin_memory(self) -> Fields:
        return self.map(lambda tensor: tensor.pin_memory())

    def share_memory_(self) -> Fields:
        return self.map(lambda tensor: tensor.share_memory_())

    def numel(self) -> int:
        return next(self.leaves())[1].numel()

    def __repr__(self) -> str:
        return ", ".join(f"{name}: {list(tensor.shape)} {tensor.dtype}" for name, tensor in self.leaves())


def no_targets(num_samples: int) -> Tensor:
    """Return the targets of samples that have none: a tensor that can be split, and counts nothing."""
    return torch.zeros(num_samples, 0)


def has_targets(targets: Any) -> bool:
    return not (isinstance(targets, Tensor) and targets.dim() == 2 and targets.shape[1] == 0)


def _map(node: Any, change: Callable[[Tensor], Tensor]) -> Any:
    if isinstance(node, dict):
        return {name: _map(value, change) for name, value in node.items()}
    return tuple(_map(value, change) for value in node) if isinstance(node, tuple) else change(node)


def _leaves(node: Any, prefix: str) -> Iterator[tuple[str, Tensor]]:
    if isinstance(node, Tensor):
        yield prefix or "values", node
        return
    for name, value in node.items() if isinstance(node, dict) else enumerate(node):
        yield from _leaves(value, f"{prefix}.{name}" if prefix else str(name))
