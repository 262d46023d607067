"""A Llama's layers for steps of one sequence: six kernels for each (kernels/one_row.py)."""

from __future__ import annotations

import copy

from torch import Tensor, nn

from dtrain.models.layers import Attend, RMSNorm
from dtrain.models.llama import MLP, Attention, Block


class OneRow(nn.Module):
    """A layer that computes what its block computes, for one token of one sequence."""

    def __init__(self, block: Block) -> None:
        super().__init__()
        self.block = block

    def forward(self, x: Tensor, rotary: Tensor, mask: Tensor | None = None, cached: Attend | None = None) -> Tensor:
        from dtrain.kernels.one_row import added, gated, rotated

        layer = self.block
        attention, mlp, norm1, norm2 = layer.attention, layer.mlp, layer.norm1, layer.norm2
        assert cached is not None and norm1.eps is not None and norm2.eps is not None
        weights = attention.q.weight, attention.k.weight, attention.v.weight
        heads = cached(*rotated(x, norm1.weight, norm1.eps, *weights, rotary, attention.head_dim), mask)
        x = added(heads, attention.proj.weight, x)
        return added(gated(x, norm2.weight, norm2.eps, mlp.gate.weight, mlp.up.weight), mlp.down.weight, x)


def fits(block: nn.Module) -> bool:
    """Is it a block as Llama has it, and not one with adapters, say? With weights that the kernels can read?"""
    if type(block) is not Block:
        return False
    attention, mlp = block.attention, block.mlp
    if (type(attention), type(mlp), type(block.norm1), type(block.norm2)) != (Attention, MLP, RMSNorm, RMSNorm):
        return False
    linear = [attention.q, attention.k, attention.v, attention.proj, mlp.gate, mlp.up, mlp.down]
    if any(type(module) is not nn.Linear for module in linear) or None in (block.norm1.eps, block.norm2.eps):
        return False
    from dtrain.kernels.one_row import supports

    return supports([module.weight for module in linear], attention.head_dim)


def one_row_copy(model: nn.Module) -> nn.Module | None:
    """Return the model with such layers and the same weights; None where they do not fit."""
    layers = getattr(model, "layers", None)
    if not isinstance(layers, nn.ModuleDict) or not all(fits(block) for block in layers.values()):
        return None
    if getattr(model, "stream", None) != next(model.parameters()).dtype:  # results are added in the stream's dtype
        return None
    made = copy.copy(model)
    made._modules = dict(model._modules)
    made._modules["layers"] = nn.ModuleDict({name: OneRow(block) for name, block in layers.items()})  # type: ignore[arg-type]
    return made
