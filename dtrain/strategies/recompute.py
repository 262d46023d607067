"""Activation checkpointing: recompute activations in the backward pass instead of keeping them."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts
from torch.utils.checkpoint import checkpoint as recompute

from dtrain.models.layers import MLP

aten, collectives = torch.ops.aten, torch.ops._c10d_functional
# ops whose results activation_checkpointing=ops saves
ATTENTION = ("scaled_dot_product", "flex_attention")  # in the names of such ops
EXPENSIVE_OPS = {
    aten.mm.default, aten.addmm.default, aten.bmm.default, aten.baddbmm.default, aten._scaled_mm.default,
    aten.convolution.default, collectives.all_reduce.default, collectives.reduce_scatter_tensor.default,
}  # fmt: skip


def checkpoint_layers(model: nn.Module, mode: str, every: int) -> None:
    """Recompute activations in the backward pass: of all layers (full), of every k-th (selective), or of all layers
    but for the results of matmuls, attention and collectives (ops).

    It replaces the layer's forward instead of wrapping the layer, so that parameter names stay canonical. It must run
    before compilation: torch.compile then traces the recomputation into its graph. The other way round, selective
    checkpoint contexts would see no ops inside the compiled graph (pytorch issue 161889).
    """
    if mode == "none":
        return
    for i, unit in enumerate(model.fsdp_units()):  # type: ignore[operator]
        if mode != "selective" or i % every == 0:
            unit.forward = Recompute(unit.forward, mode == "ops")
            # torch 2.11 still saves an autograd function's input: 10 d bytes per token in GPT-2's layer, not 2 d
            for part in unit.modules() if mode != "ops" else ():
                if isinstance(part, MLP):
                    part.fuses = False


class Recompute:
    """A forward pass that is recomputed in the backward pass; cheap_only: except what `save_expensive` saves.

    A class of ours, because a closure would still refer to the first layer after a pipeline copies the model, and
    torch.compile finds nothing to compile in a functools.partial of torch's own function.
    """

    def __init__(self, forward: Callable[..., Any], cheap_only: bool) -> None:
        contexts = functools.partial(create_selective_checkpoint_contexts, save_expensive)
        self.forward = forward
        self.options: dict[str, Any] = {"context_fn": contexts} if cheap_only else {}

    def __call__(self, *inputs: Any, **named: Any) -> Any:
        return recompute(self.forward, *inputs, use_reentrant=False, **self.options, **named)


def save_expensive(context: Any, operation: Any, *inputs: Any, **named: Any) -> CheckpointPolicy:
    """Save the results of matmuls, attention and collectives; recompute everything else."""
    expensive = operation in EXPENSIVE_OPS or any(name in str(operation) for name in ATTENTION)
    return CheckpointPolicy.MUST_SAVE if expensive else CheckpointPolicy.PREFER_RECOMPUTE
