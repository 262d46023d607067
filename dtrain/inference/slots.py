"""A KV cache with room for several sequences, each with its own length: they join and leave a running batch."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from dtrain.models.layers import Cache, attend


class Slots:
    """The memory of all layers: [slots + 1, key heads, capacity, head dim] each. The last slot is for padding rows.

    `place` says where the tokens of the next step go. All shapes stay the same, so a step can be a CUDA graph.
    """

    def __init__(self, model: nn.Module, num_slots: int, capacity: int) -> None:
        self.num_slots, self.capacity = num_slots, capacity
        first = next(model.parameters())
        self.device = first.device
        shapes = layer_shapes(model)
        # on a CPU memory that was never written to is never read, and costs nothing
        make = torch.zeros if self.device.type == "cuda" else torch.empty
        self.layers: dict[str, SlotLayer] = {}
        for name, (num_heads, head_dim, dtype) in shapes.items():
            shape = (num_slots + 1, num_heads, capacity, head_dim)
            keys, values = (make(shape, dtype=dtype, device=self.device) for _ in range(2))
            self.layers[name] = SlotLayer(keys, values, has_kernel(self.device, head_dim, dtype))
        self.positions = torch.empty(0)

    def place(self, rows: Tensor, positions: Tensor, active: Iterable[tuple[int, int, int]] = ()) -> None:
        """Set each sequence's slot and length. `active`: row, slot and length, on a CPU."""
        self.positions = positions
        held = list(active)
        for layer in self.layers.values():
            layer.rows, layer.positions, layer.active = rows, positions, held

    def one(self, slot: int) -> Cache:
        """Return one slot as the cache of one sequence, to compute a prompt."""
        cache = Cache(self.capacity)
        cache.kept = {n: (x.keys[slot : slot + 1], x.values[slot : slot + 1]) for n, x in self.layers.items()}
        return cache

    # ---- what a model calls (dtrain.models.layers.Context) ---------------------------------------------------

    def tokens(self, tokens: Tensor) -> Tensor:
        return tokens

    def places(self, inputs: Tensor) -> tuple[Tensor, None]:
        return self.positions[:, None], None

    def of(self, layer: str) -> SlotLayer:
        return self.layers[layer]

    def advance(self, count: int) -> None:
        """The lengths belong to the decoder."""


class SlotLayer:
    """One layer's keys and values. Calling it is the attention of one new token per row."""

    def __init__(self, keys: Tensor, values: Tensor, kernel: bool) -> None:
        self.keys, self.values, self.kernel = keys, values, kernel
        self.rows = self.positions = torch.empty(0)
        self.active: list[tuple[int, int, int]] = []

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None) -> Tensor:
        if self.kernel:
            attended = torch.ops.dtrain.decode_attention  # kernels/decode_attention.py; by this name compilers know it
            return attended(q, k, v, self.keys, self.values, self.rows, self.positions).flatten(1)[:, None]
        if q.device.type == "cpu":
            return self.one_by_one(q, k, v)
        return self.masked(q, k, v)

    def one_by_one(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Attend in each row over exactly its own length: the result does not depend on the other rows."""
        out = q.new_zeros(q.shape[0], 1, q.shape[1] * q.shape[3])
        for row, slot, length in self.active:
            self.keys[slot, :, length] = k[row, :, 0]
            self.values[slot, :, length] = v[row, :, 0]
            keys, values = (x[slot : slot + 1, :, : length + 1] for x in (self.keys, self.values))
            out[row] = attend(q[row : row + 1], keys, values)[0]
        return out

    def masked(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Attend over the whole capacity on a GPU, for shapes that the kernel does not have."""
        self.keys[self.rows, :, self.positions] = k[:, :, 0]
        self.values[self.rows, :, self.positions] = v[:, :, 0]
        there = torch.arange(self.keys.shape[2], device=q.device) <= self.positions[:, None]
        return attend(q, self.keys[self.rows], self.values[self.rows], there[:, None, None])


@torch.inference_mode()
def layer_shapes(model: nn.Module) -> dict[str, tuple[int, int, torch.dtype]]:
    """Return key heads, head dim and dtype of each layer's cache, from one token."""
    cache = Cache(1)
    model(torch.zeros(1, 1, dtype=torch.int64, device=next(model.parameters()).device), cache=cache)
    return {name: (keys.shape[1], keys.shape[3], keys.dtype) for name, (keys, _) in cache.kept.items()}


def has_kernel(device: torch.device, head_dim: int, dtype: torch.dtype) -> bool:
    if device.type != "cuda":
        return False
    from dtrain.kernels import decode_attention

    return decode_attention.supports(head_dim, dtype)
