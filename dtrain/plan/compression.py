"""What `strategy.compress` sends and holds: bytes of a step, by the shapes of the gradients. Mirrors dtrain/comm.

benchmarks/compression.py compares the bytes with what the kernel counted.
"""

from __future__ import annotations

import math
from collections import Counter

from dtrain.plan.layout import Layout
from dtrain.plan.model_shape import Convolutions, Shape
from dtrain.plan.parameters import block_linears, is_target, trained_parameters

Shapes = Counter[tuple[int, ...]]  # of parameters, and how many there are of each
WIDE, HALF = 4, 2
BLOCK = 256  # values that share a scale (comm/quantize.py)
CODES = {"int8": BLOCK + WIDE, "onebit": BLOCK // 8 + WIDE}  # bytes of a block and its scale
WITH_ERRORS = ("int8", "onebit", "powersgd", "topk")
# Passes over the gradients in device memory, read or written, in fp32: counted in the code, not measured.
PASSES = {"fp16": 5, "bf16": 5, "int8": 26, "onebit": 26, "powersgd": 12, "topk": 12}


def sent_bytes(word: str, shapes: Shapes, ranks: int, rank: int = 4, ratio: float = 0.01) -> float:
    """Bytes that each rank sends to average gradients of these shapes; 2 (n - 1) / n × 4 per value with no word."""
    return float(sum(count * sent_of(word, shape, ranks, rank, ratio) for shape, count in shapes.items()))


def sent_of(word: str, shape: tuple[int, ...], ranks: int, rank: int, ratio: float) -> float:
    numel, ring = math.prod(shape), 2 * (ranks - 1) / ranks
    if word in ("fp16", "bf16"):
        return ring * HALF * numel
    if not is_compressed(word, shape, rank):
        return ring * WIDE * numel
    if word == "powersgd":
        return ring * WIDE * rank * (shape[0] + numel // shape[0])
    if word == "topk":  # an index and a value, from each rank to each other
        return (ranks - 1) * 2 * WIDE * max(1, round(numel * ratio))
    return 2 * (ranks - 1) * -(-numel // (ranks * BLOCK)) * CODES[word]


def is_compressed(word: str, shape: tuple[int, ...], rank: int) -> bool:
    """Norms and biases are sent whole, and under powersgd matrices whose factors would be larger."""
    if word == "powersgd" and len(shape) > 1:
        columns = math.prod(shape[1:])
        return rank * (shape[0] + columns) < shape[0] * columns
    return word in WITH_ERRORS and len(shape) > 1


def gradient_shapes(shape: Shape) -> Shapes:
    """The shapes of a model's trained parameters. All that is no matrix counts as vectors of one element."""
    found: Shapes = Counter()
    if isinstance(shape, Convolutions):
        for layer in shape.layers:
            found[layer.out_channels, layer.in_channels * layer.kernel**2] += 1
        for ins, outs in shape.linear:
            found[outs, ins] += 1
    elif shape.lora_rank:
        for linear in block_linears(shape):
            if is_target(shape, linear):
                found[shape.lora_rank, linear.ins] += shape.num_layers
                found[linear.outs, shape.lora_rank] += shape.num_layers
        if shape.task == "classify":
            found[shape.vocab_size, shape.dim] += 1
    else:
        for linear in block_linears(shape):
            found[linear.outs, linear.ins] += shape.num_layers
        for rows in (shape.rows, shape.learned_positions):
            if rows:
                found[rows, shape.dim] += 1
        if not shape.tied or shape.kind == "vit" or (shape.kind == "bert" and shape.task != "mlm"):
            found[shape.vocab_size, shape.dim] += 1
        if shape.kind == "bert":
            found[2, shape.dim] += 1
            found[shape.dim, shape.dim] += 1
        if shape.kind == "vit":
            found[shape.dim, shape.patch_inputs] += 1
    found[1,] += trained_parameters(shape) - sum(math.prod(s) * count for s, count in found.items())
    return found


def held_shapes(shape: Shape, layout: Layout) -> Shapes:
    """What one rank compresses: all parameters under ddp, a shard of their rows in a replica of fsdp."""
    shards = layout.replica_size or 1
    found: Shapes = Counter()
    for one, count in gradient_shapes(shape).items():
        if one == (1,):
            found[one] += -(-count // shards)
        else:
            found[-(-one[0] // shards), *one[1:]] += count
    return found


def share_sent(shape: Shape, layout: Layout) -> float:
    """Bytes sent under compression, relative to an all-reduce of fp32."""
    ranks = layout.token_ranks // (layout.replica_size or 1)
    if layout.compress == "none" or ranks == 1:
        return 1.0
    shapes = held_shapes(shape, layout)
    settings = (ranks, layout.compress_rank, layout.compress_ratio)
    return sent_bytes(layout.compress, shapes, *settings) / sent_bytes("none", shapes, *settings)


def state_bytes(shape: Shape, layout: Layout) -> float:
    """Errors of the last update and of the step in progress, an owner's share of both, and PowerSGD's Q."""
    ranks = layout.token_ranks // (layout.replica_size or 1)
    if layout.compress not in WITH_ERRORS or ranks == 1:
        return 0.0
    shapes = held_shapes(shape, layout)
    matrices = {s: count for s, count in shapes.items() if is_compressed(layout.compress, s, layout.compress_rank)}
    values = sum(math.prod(s) * count for s, count in matrices.items())
    errors = 2 * WIDE * values * (1 + (1 / ranks if layout.compress in CODES else 0))
    if layout.compress == "powersgd":
        errors += 2 * WIDE * layout.compress_rank * sum(math.prod(s[1:]) * count for s, count in matrices.items())
    return errors
