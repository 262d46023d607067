"""Count the parameters of each part of a model, and how many a rank holds. Exact; the tests build the models.

A transformer has a first end (embedding, positions), equal blocks, and a last end (norm, head). Tensor parallelism
shards the blocks' matrices, and with loss parallel also embedding and head; pipeline stages hold whole blocks and the
ends that belong to them.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable
from dataclasses import dataclass

from dtrain.kernels import fits_bf16, fits_int8
from dtrain.plan.model_shape import Convolutions, Shape, Transformer
from dtrain.strategies.stage_layout import balance


@dataclass(frozen=True)
class Linear:
    """A linear layer of a block, and how tensor parallelism shards it: by outputs (column) or by inputs (row)."""

    name: str
    ins: int
    outs: int
    biased: bool
    column: bool

    def parameters(self, tp: int = 1) -> int:
        """Parameters on one tensor-parallel rank. The bias is sharded with the outputs, and whole in a row layer."""
        bias = (self.outs // tp if self.column else self.outs) if self.biased else 0
        return self.ins * self.outs // tp + bias

    def adapter(self, rank: int, tp: int = 1) -> int:
        """LoRA's two thin matrices; the one on the side that is not sharded is whole on every rank."""
        ins, outs = (self.ins, self.outs // tp) if self.column else (self.ins // tp, self.outs)
        return rank * (ins + outs)


@functools.lru_cache(maxsize=256)
def block_linears(shape: Transformer) -> tuple[Linear, ...]:
    """Return the linear layers of one block, with their names in the models."""
    d, h, kv, b = shape.dim, shape.hidden_dim, shape.kv_dim, shape.biased
    if shape.fused_qkv:
        attention = [Linear("attention.qkv", d, d + 2 * kv, b, True)]
    else:
        attention = [Linear(f"attention.{name}", d, outs, b, True) for name, outs in (("q", d), ("k", kv), ("v", kv))]
    gate = [Linear("mlp.gate", d, h, b, True)] if shape.gated else []
    return (
        *attention,
        Linear("attention.proj", d, d, b, False),
        *gate,
        Linear("mlp.up", d, h, b, True),
        Linear("mlp.down", h, d, b, False),
    )


@dataclass(frozen=True)
class Parts:
    """Parameters of each part of a transformer on one tensor-parallel rank."""

    embed: int  # the token embedding table
    positions: int  # and other parameters at the input: segments and their norm, patches
    block: int
    norm: int  # the final one
    head: int  # besides a tied embedding: the untied matrix, a bias, BERT's transform

    @property
    def first(self) -> int:
        return self.embed + self.positions


@functools.lru_cache(maxsize=1024)
def parts(shape: Transformer, tp: int = 1, loss_parallel: bool = False) -> Parts:
    """Parameters of each part on one of `tp` tensor-parallel ranks, without adapters."""
    d = shape.dim
    one_norm = 2 * d if shape.biased else d
    rows = shape.rows // tp if loss_parallel else shape.rows
    head_rows = shape.vocab_size // tp if loss_parallel else shape.vocab_size
    positions, norm, head = shape.learned_positions * d, one_norm, 0
    if shape.kind == "bert":
        positions += 2 * d + one_norm  # segments, and the norm after the sum
        norm = 0  # each block ends in one
        head = d * d + d  # transform or pooler
        if shape.task == "mlm":
            head += one_norm + shape.vocab_size  # the output bias is never sharded in memory
        else:
            head += d * shape.vocab_size + shape.vocab_size
    elif shape.kind == "vit":
        positions += d + shape.patch_inputs * d + d  # class token, projection and its bias
        head = d * shape.vocab_size + shape.vocab_size
    elif not shape.tied:
        head = head_rows * d
    block = sum(linear.parameters(tp) for linear in block_linears(shape)) + 2 * one_norm
    return Parts(rows * d, positions, block, norm, head)


def adapters(shape: Transformer, tp: int = 1) -> int:
    """Trained parameters that LoRA adds to one block, on one tensor-parallel rank."""
    if not shape.lora_rank:
        return 0
    return sum(linear.adapter(shape.lora_rank, tp) for linear in block_linears(shape) if is_target(shape, linear))


def is_target(shape: Transformer, linear: Linear) -> bool:
    """Does this layer have an adapter? A target is a name suffix, or the full name of one layer."""
    targets = [t.split(".", 2)[2] if t.startswith("layers.") else t for t in shape.lora_targets]
    return not targets or any(linear.name == t or linear.name.endswith(f".{t}") for t in targets)


def factored(shape: Shape, cut: Iterable[Stage]) -> int:
    """Elements of Adafactor's state for these stages: rows and columns of matrices, and all of vectors. Not sharded."""
    if isinstance(shape, Convolutions):
        kernels = sum(2 * c.in_channels * c.out_channels * c.kernel + 2 * c.out_channels for c in shape.layers)
        return kernels + sum(ins + 2 * outs for ins, outs in shape.linear)
    d, rank = shape.dim, shape.lora_rank
    norm = 2 * d if shape.biased else d
    if rank:
        adapted = [linear for linear in block_linears(shape) if is_target(shape, linear)]
        return sum(stage.layers * sum(linear.ins + linear.outs + 2 * rank for linear in adapted) for stage in cut)
    block = sum(one.ins + one.outs * (2 if one.biased else 1) for one in block_linears(shape)) + 2 * norm
    first = shape.rows + shape.learned_positions + 2 * d
    last = norm + (0 if shape.tied else shape.vocab_size + d)
    if shape.kind == "bert":  # segments at the input, a transform or pooler before the head
        first, last = first + d + 2, last + 3 * d + shape.vocab_size
    return sum(stage.layers * block + stage.is_first * first + stage.is_last * last for stage in cut)


def compressed(shape: Shape, cut: Iterable[Stage], state: str, tp: int = 1, loss_parallel: bool = False) -> int:
    """Trained parameters of these stages whose moments are in bf16 or int8 under optim.state."""
    fits = {"bf16": fits_bf16, "int8": fits_int8}.get(state)
    if fits is None:
        return 0
    if isinstance(shape, Convolutions):
        kernels = [(c.out_channels, c.in_channels, c.kernel, c.kernel) for c in shape.layers]
        return sum(
            math.prod(sides) for sides in (*kernels, *((outs, ins) for ins, outs in shape.linear)) if fits(sides)
        )
    count = sum(stage.layers for stage in cut) * sum(
        math.prod(sides) // ways for sides, ways in block_matrices(shape, tp) if fits(sides)
    )
    of_ends = [sides for stage in cut for sides in end_matrices(shape, stage)]
    table = {(shape.rows, shape.dim), (shape.vocab_size, shape.dim)} if loss_parallel else set()
    return count + sum(math.prod(sides) // (tp if sides in table else 1) for sides in of_ends if fits(sides))


def block_matrices(shape: Transformer, tp: int) -> list[tuple[tuple[int, int], int]]:
    """The trained matrices of one block, and over how many tensor ranks each is sharded."""
    if not shape.lora_rank:
        return [((one.outs, one.ins), tp) for one in block_linears(shape)]
    adapted = [one for one in block_linears(shape) if is_target(shape, one)]
    a = [((shape.lora_rank, one.ins), 1 if one.column else tp) for one in adapted]
    return a + [((one.outs, shape.lora_rank), tp if one.column else 1) for one in adapted]


def end_matrices(shape: Transformer, stage: Stage) -> list[tuple[int, int]]:
    """The trained matrices of a stage outside of its blocks."""
    d, found = shape.dim, []
    if stage.is_first and not shape.lora_rank:
        found += [(shape.rows, d), (shape.learned_positions, d)]
        found += {"bert": [(2, d)], "vit": [(d, shape.patch_inputs)]}.get(shape.kind, [])
    if stage.is_last and (not shape.lora_rank or shape.task == "classify"):
        found += [(d, d)] if shape.kind == "bert" else []
        if not has_tied_copy(shape) or not stage.is_first:
            found.append((shape.vocab_size, d))
    return found


# ---- whole models --------------------------------------------------------------------------------------------


def num_parameters(shape: Shape) -> int:
    """Parameters as published: without vocabulary padding and adapters."""
    if isinstance(shape, Convolutions):
        return held_parameters(shape)
    tables = 1 if shape.tied or shape.kind != "language" else 2
    padding = shape.padding * shape.dim * tables
    if shape.kind == "bert" and shape.task == "mlm":
        padding += shape.padding
    p = parts(shape)
    return p.first + shape.num_layers * p.block + p.norm + p.head - padding


def held_parameters(shape: Shape) -> int:
    """Parameters in memory: with padding and adapters."""
    if isinstance(shape, Convolutions):
        linear = sum(ins * outs + outs for ins, outs in shape.linear)
        return sum(layer.parameters for layer in shape.layers) + linear
    p = parts(shape)
    return p.first + shape.num_layers * (p.block + adapters(shape)) + p.norm + p.head


def trained_parameters(shape: Shape) -> int:
    """Parameters with gradients and optimizer state: all, or with LoRA the adapters and a classifier's new head."""
    if isinstance(shape, Convolutions) or not shape.lora_rank:
        return held_parameters(shape)
    head = parts(shape).head if shape.task == "classify" else 0
    return shape.num_layers * adapters(shape) + head


def flops_per_sample(shape: Shape) -> float:
    """FLOPs of forward and backward for one sample, counted like the models' own flops_per_sample(), for MFU."""
    if isinstance(shape, Convolutions):
        linear = sum(ins * outs for ins, outs in shape.linear)
        forward = [layer.multiplications for layer in shape.layers]
        return 2.0 * (3 * (sum(forward) + linear) - forward[0])
    n, d, layers = shape.seq_len, shape.dim, shape.num_layers
    if shape.kind == "vit":
        patches = (n - 1) * shape.patch_inputs * d
        block = 12 * d**2 * n + 2 * n**2 * d
        flops = 2.0 * (2 * patches + 3 * (layers * block + d * shape.vocab_size))
    elif shape.kind == "bert":
        flops = n * (6.0 * layers * (12 * d**2 + 9 * d) + 12.0 * layers * d * n)
        classes = shape.vocab_size - (shape.padding if shape.task == "mlm" else 0)
        flops += 6.0 * round(shape.asked * n) * (d**2 + d * classes)
    else:
        multiplied = num_parameters(shape) - (0 if shape.tied else (shape.vocab_size - shape.padding) * d)
        flops = n * (6.0 * multiplied + 12.0 * layers * d * n)
    return flops * (2 / 3) if shape.lora_rank else flops


# ---- pipeline stages -----------------------------------------------------------------------------------------


@functools.lru_cache(maxsize=1024)
def stage_bounds(shape: Transformer, num_stages: int) -> tuple[tuple[int, int], ...]:
    """Blocks of each stage: balanced by parameters before tensor sharding, like pipeline_stages.split_points."""
    if num_stages == 1:
        return ((0, shape.num_layers),)
    p = parts(shape)
    last = p.norm + p.head + (p.embed if has_tied_copy(shape) else 0)
    layers = [p.block + adapters(shape)] * shape.num_layers
    return tuple(balance(layers, p.first, last, num_stages))


def has_tied_copy(shape: Transformer) -> bool:
    """Does the last stage also hold the embedding, because it is the head?"""
    return shape.tied and shape.task != "classify"


@dataclass(frozen=True)
class Stage:
    """Parameters of one pipeline stage on one tensor-parallel rank."""

    layers: int
    is_first: bool
    is_last: bool
    blocks: int  # parameters of all its blocks, without adapters
    adapters: int
    ends: int  # embedding, positions, last norm and head, as far as the stage has them

    @property
    def parameters(self) -> int:
        return self.blocks + self.adapters + self.ends


@functools.lru_cache(maxsize=4096)
def stages(shape: Transformer, num_stages: int, tp: int = 1, loss_parallel: bool = False) -> tuple[Stage, ...]:
    """Return what each stage holds on one tensor-parallel rank."""
    p, extra = parts(shape, tp, loss_parallel), adapters(shape, tp)
    made = []
    for low, high in stage_bounds(shape, num_stages):
        is_first, is_last = low == 0, high == shape.num_layers
        ends = p.first if is_first else 0
        if is_last:
            ends += p.norm + p.head + (p.embed if has_tied_copy(shape) and not is_first else 0)
        made.append(Stage(high - low, is_first, is_last, (high - low) * p.block, (high - low) * extra, ends))
    return tuple(made)
