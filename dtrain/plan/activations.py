"""What the backward pass needs of the forward pass, in bytes: what autograd really saves in our models, op by op.

Norms and the residual stream are float32 in every precision; products are in 2 bytes under bf16 and fp16. Saved by an
eager block, for each token (d: dim, h: hidden_dim, kv: width of keys, e: bytes of a product's numbers):

- a norm its input (4 d) and its statistics; a linear layer its input, cast to e bytes: each layer makes its own copy,
  so q, k and v have three (autocast remembers casts of weights, not of activations);
- attention queries, keys, values, its result (e (2 d + 2 kv)), and the logarithm of each row's sum (4 bytes a head);
- the activation its input and its result; a gated one also the other factor and the product (4 h e).

tests/plan/test_activations.py counts the same with torch's own hooks.
"""

from __future__ import annotations

from dtrain.plan.counts import block_linears, is_target
from dtrain.plan.layout import Layout
from dtrain.plan.shape import Convolutions, Transformer

WIDE = 4  # bytes of a float32 number


def product_bytes(precision: str) -> int:
    """Of a number that goes through a matrix product."""
    return 4 if precision == "fp32" else 2


def block_bytes(shape: Transformer, layout: Layout) -> float:
    """Saved by one block for one token, on one tensor rank."""
    e, d, h, kv = product_bytes(layout.precision), shape.dim, shape.hidden_dim, shape.kv_dim
    tp = layout.tp
    between = tp if layout.sequence_parallel else 1  # who shares what lies between the products
    inner = e * (2 * d + 2 * kv) + WIDE * shape.num_heads  # queries, keys, values, result, log-sums
    if shape.packed or shape.padded_mask:
        inner += mask_bytes(shape, e)
    inner += e * h * (4 if shape.gated else 2)
    statistics = 2 * (8 if shape.biased else 4)  # mean and 1/std, or only that, of two norms
    outer = 2 * WIDE * d + statistics
    if shape.dropout:
        outer += 2 * d  # a byte for each number that is kept or not
    return inner / tp + outer / between + cast_bytes(shape, e) + lora_bytes(shape, e) / tp


def cast_bytes(shape: Transformer, e: int) -> float:
    """The inputs of a block's first products; those of later ones are saved by who made them. Never cut: 4 bytes once,
    and in 2 bytes once for each layer that casts it."""
    d = shape.dim
    if e == WIDE:
        return 2.0 * e * d
    return float(e * d * ((1 if shape.fused_qkv else 3) + (2 if shape.gated else 1)))


def mask_bytes(shape: Transformer, e: int) -> float:
    """A mask becomes numbers that are added to the scores, anew in every layer: a row of them for each token."""
    if shape.packed:  # and shared heads of keys and values are written out
        return e * shape.seq_len + 2 * e * (shape.dim - shape.kv_dim)
    return float(e)


def lora_bytes(shape: Transformer, e: int) -> float:
    """An adapter saves the thin product between its two matrices, before and after it is scaled."""
    if not shape.lora_rank:
        return 0.0
    return float(sum(2 * e * shape.lora_rank for linear in block_linears(shape) if is_target(shape, linear)))


def kept_layers(num_layers: int, layout: Layout) -> tuple[int, int]:
    """How many layers keep what they save, and how many only their input, to be computed again."""
    if layout.activation_checkpointing == "full":
        return 0, num_layers
    if layout.activation_checkpointing == "selective":
        again = -(-num_layers // layout.activation_checkpointing_every)
        return num_layers - again, again
    return num_layers, 0


def convolution_bytes(shape: Convolutions, layout: Layout) -> tuple[float, float, float]:
    """Of one picture: saved by all, by the largest unit alone, and by all when each unit keeps only its input.

    A convolution's result is saved by the norm after it, and what the activation makes of that by the activation and
    the next convolution. A pooling also saves which pixel was the largest: 8 bytes for each that comes out.
    """
    e = product_bytes(layout.precision)
    saved: dict[int, float] = {}
    inputs: dict[int, float] = {}
    picture = shape.image_size**2 * shape.channels
    saved[-1] = float(e * picture + (WIDE * picture if e != WIDE else 0))
    before = float(e * picture)
    for layer in shape.layers:
        out = float(e * layer.outputs)
        inputs.setdefault(layer.unit, before)
        kept = out if layer.shortcut else 2 * out  # beside a shortcut's norm there is no activation
        if shape.pooled == "each" or (shape.pooled == "stem" and layer.unit == -1):
            kept += (e + 8) * layer.outputs / 4
        saved[layer.unit] = saved.get(layer.unit, 0.0) + kept
        if not layer.shortcut:
            before = out
    units = [unit for unit in saved if unit != -1]
    recomputed = saved[-1] + sum(inputs[unit] for unit in units)
    return sum(saved.values()), max(saved[unit] for unit in units), recomputed
